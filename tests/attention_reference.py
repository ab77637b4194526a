"""Dense attention in float64 with the mask written out, and how far a right result may be off.

No bound of attention's error is both simple and sharp, so results are held against the error of
torch's own dense attention *in the same dtype on the same inputs*: `SLACK` times its largest error,
plus `SLACK` round-offs of the largest value. A result in parts differs from a dense one by the
rounding of each part to the dtype and of the merged sum: for W parts of one row, with weights that
add up to 1, at most twice the rounding of a dense result. A further factor of 2 is for largest
errors of a few hundred elements differing by chance. In float64 the reference errs as well, so the
dense error is unknown: it is assumed to grow as the root of the number of terms.

The gradient of a score is the difference of two sums over the features of a value. Where a row sees
one key these are equal, and only their rounding is left, which is as large as rounding the terms
(`Problem.terms`), not the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SLACK = 4.0


@dataclass(frozen=True)
class Problem:
    """The whole sequence: q (B, H, S, E), k and v (B, G, S_k, E or V), a mask, what flows back."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    visible: torch.Tensor  # (S, S_k)
    grad_out: torch.Tensor
    grad_lse: torch.Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # (H,)
    bias: torch.Tensor | None = None  # (H, S + S_k - 1)
    kept: torch.Tensor | None = None  # (B, H, S, S_k)
    dropout_p: float = 0.0

    def solve(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Results and gradients, computed densely in `dtype`."""
        q, k, v = (t.to(dtype, copy=True).requires_grad_() for t in (self.q, self.k, self.v))
        repeats = q.shape[1] // max(1, k.shape[1])
        keys, values = (t.repeat_interleave(repeats, 1) for t in (k, v))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        inputs = {"q": q, "k": k, "v": v}
        for name, tensor in (("sinks", self.sinks), ("bias", self.bias)):
            if tensor is not None:
                inputs[name] = tensor.to(wide).requires_grad_()
        # As kernels do it: products of 16-bit numbers are added up in float32.
        scores = self._scores(q.to(wide), keys.to(wide), inputs.get("bias"))
        summed = scores
        if self.sinks is not None:
            # Like a masked score, a sink of -inf has no gradient.
            sinks = inputs["sinks"].masked_fill(self.sinks == -torch.inf, -torch.inf)
            each = sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)
            summed = torch.cat((scores, each), -1)
        lse = summed.logsumexp(-1)
        finite = lse.masked_fill(lse == -torch.inf, 0.0)
        weights = (scores - finite.unsqueeze(-1)).exp()
        if self.kept is not None:
            weights = weights * self.kept / (1 - self.dropout_p)
        out = (weights.to(dtype).to(wide) @ values.to(wide)).to(dtype)
        outputs, grads = [out], [self.grad_out.to(dtype)]
        if self.grad_lse is not None:
            # Where nothing is seen, lse is -inf whatever the inputs are.
            outputs.append(torch.where(lse == -torch.inf, 0.0, lse))
            grads.append(torch.where(lse == -torch.inf, 0.0, self.grad_lse.to(wide)))
        found = torch.autograd.grad(outputs, list(inputs.values()), grads)
        plain = self.bias is None and self.softcap is None and v.shape == k.shape
        if plain and dtype.itemsize == 2 and q.numel() and k.numel() and q.device.type == "cpu":
            # torch's kernel computes exponentials of 16-bit types to 20 bits.
            bias = torch.zeros(self.visible.shape).masked_fill(~self.visible, -torch.inf)
            _, approximate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q.detach(), k.detach(), v.detach(), attn_mask=bias, scale=self.scale
            )
            approximate = approximate.masked_fill(~self.visible.any(-1), -torch.inf)
            if self.sinks is not None:
                approximate = torch.logaddexp(approximate, sinks.detach().view(-1, 1))
            lse = torch.where(lse == -torch.inf, lse, approximate)
        return {"out": out, "lse": lse, **dict(zip(inputs, found, strict=True))}

    def terms(self) -> dict[str, float]:
        """The size of the terms of the gradients of q and k: the largest root of their squares."""
        q, k, v = (t.double() for t in (self.q, self.k, self.v))
        if not (q.numel() and k.numel()):
            return {}
        repeats = q.shape[1] // k.shape[1]
        keys, values = (t.repeat_interleave(repeats, 1) for t in (k, v))
        exact = self.solve(torch.float64)
        bias = None if self.bias is None else self.bias.double()
        lse = exact["lse"].detach().masked_fill(exact["lse"] == -torch.inf, torch.inf)
        weights = (self._scores(q, keys, bias) - lse.unsqueeze(-1)).exp()
        through = self.grad_out.double().square() @ values.square().mT
        if self.kept is not None:
            through = through * self.kept / (1 - self.dropout_p) ** 2
        inner = (self.grad_out * exact["out"].detach()).square().sum(-1, keepdim=True)
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        of_scores = weights.square() * (through + inner) * scale**2
        of_keys = (of_scores.mT @ q.square()).unflatten(1, (-1, repeats)).sum(2)
        squares = {"q": of_scores @ keys.square(), "k": of_keys}
        return {name: float(square.max()) ** 0.5 for name, square in squares.items()}

    def _scores(self, q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = (q @ k.mT) * scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if bias is not None:
            rows, keys = scores.shape[-2:]
            scores = scores + bias[:, torch.arange(keys) - torch.arange(rows)[:, None] + rows - 1]
        return scores.masked_fill(~self.visible, -torch.inf)


def check(
    name: str,
    actual: torch.Tensor,
    exact: torch.Tensor,
    dense: torch.Tensor,
    rows: torch.Tensor,
    dtype: torch.dtype,
    terms: int | None = None,
    dropped: float = 0.0,
    size: float = 1.0,
) -> None:
    """Raises `AssertionError` unless these rows of a result are right to what the dtype allows.

    `terms`: the number of terms of a sum over rows, by default of a row. `dropped`: the share of
    weights that dropout drops, so that kept ones are divided by 1 - `dropped`. `size`: the size of
    the terms of a sum, if they may be larger than the result.
    """
    expected, reference = exact.detach()[:, :, rows], dense.detach().double()
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
    seen = exact.isfinite()
    assert torch.equal(actual.isfinite(), expected.isfinite()), name
    exact = exact.detach()
    error = (reference - exact).masked_fill(~seen, 0).abs().max() if exact.numel() else 0.0
    largest = exact.masked_fill(~seen, 0).abs().max() if exact.numel() else 0.0
    if terms is None:
        # In 16 bits rounding the result is more than rounding its sum, which is in float32.
        terms = exact.shape[2] + exact.shape[-1] if dtype.itemsize > 2 else 1
    unit = torch.finfo(dtype).eps * terms**0.5 / (1 - dropped)
    wide = dtype if dtype == torch.float64 else torch.float32
    sums = torch.finfo(wide).eps * exact.shape[-1] if exact.dim() == 4 else 0.0
    bound = SLACK * (float(error) + (unit + sums) * max(1.0, size, float(largest)))
    off = (actual.detach().double() - expected).masked_fill(~expected.isfinite(), 0).abs()
    worst = float(off.max()) if off.numel() else 0.0
    assert worst <= bound, f"{name}: off by {worst:.3g}, bound {bound:.3g}"
