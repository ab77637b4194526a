#include "ops/routing.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "base/parallel.h"
#include "base/team.h"
#include "exchange/copy.h"
#include "exchange/row_sums.h"
#include "memory/slot_stores.h"

namespace symm_cp::experts {

using namespace kernels;

int64_t experts_of_rank(const char* op, int64_t experts, int64_t ranks) {
  TORCH_CHECK_VALUE(experts > 0 && experts % ranks == 0, op, ": num_experts=", experts,
                    " must be a positive multiple of world size ", ranks);
  return experts / ranks;
}

// --- Routing ---------------------------------------------------------------------------------

int64_t check_table(const char* op, const at::Tensor& table, int64_t experts, int64_t ranks) {
  const int64_t local = experts_of_rank(op, experts, ranks);
  TORCH_CHECK_TYPE(table.scalar_type() == at::kLong && table.is_contiguous(), op,
                   ": table must be a contiguous torch.int64 tensor, is ",
                   name_dtype(table.scalar_type()));
  TORCH_CHECK_VALUE(table.dim() == 1 && table.numel() >= ranks * experts, op, ": table ",
                    table.sizes(), " is not of a routing of ", ranks, " ranks to ", experts,
                    " experts");
  return local;
}

Routing::Routing(const char* op, const at::Tensor& table, int64_t experts, const Group& group)
    : ranks_(group.world_size()),
      rank_(group.rank()),
      experts_(experts),
      local_(check_table(op, table, experts, ranks_)) {
  counts_ = table.const_data_ptr<int64_t>();
  places_ = counts_ + ranks_ * experts_;
  pairs_ = table.numel() - ranks_ * experts_;
  read_pairs(op);
  begins_.resize(static_cast<size_t>(ranks_ + 1));
  for (int64_t e = 0; e < experts_; ++e) begins_[e / local_ + 1] += count(rank_, e);
  for (int64_t r = 0; r < ranks_; ++r) begins_[r + 1] += begins_[r];
  place_rows();
}

void Routing::read_pairs(const char* op) {
  const bool counted =
      std::all_of(counts_, places_, [](int64_t n) { return n >= 0 && n <= INT32_MAX; });
  for (int64_t e = 0; counted && e < experts_; ++e) sent_ += count(rank_, e);
  pair_at_.assign(static_cast<size_t>(counted && sent_ <= pairs_ ? sent_ : 0), kDropped);
  int64_t found = 0;
  for (int64_t pair = 0; pair < pairs_; ++pair) {
    const int64_t at = places_[pair];
    if (at < 0 || at >= static_cast<int64_t>(pair_at_.size()) || pair_at_[at] >= 0) continue;
    pair_at_[at] = pair;
    ++found;
  }
  TORCH_CHECK_VALUE(counted && found == sent_, op, ": table is not one of a routing of rank ",
                    rank_);
}

void Routing::place_rows() {
  first_rows_.resize(static_cast<size_t>(ranks_ * experts_));
  arriving_.resize(static_cast<size_t>(ranks_));
  for (int64_t owner = 0; owner < ranks_; ++owner) {
    int64_t row = 0;
    for (int64_t e = owner * local_; e < (owner + 1) * local_; ++e)
      for (int64_t r = 0; r < ranks_; ++r) {
        first_rows_[r * experts_ + e] = row;
        if (owner != rank_) row += count(r, e);
        for (int64_t i = 0; owner == rank_ && i < count(r, e); ++i) arriving_[r].push_back(row++);
      }
    if (owner == rank_) rows_ = row;
    most_rows_ = std::max(most_rows_, row);
  }
}

std::vector<int64_t> Routing::tokens(int64_t top_k) const {
  std::vector<int64_t> all(pair_at_);
  for (int64_t& pair : all) pair /= top_k;
  return all;
}

// --- rows ------------------------------------------------------------------------------------

TokenRows::TokenRows(const at::Tensor& given)
    : tensor(given.numel() > 0 && given[0].is_contiguous() ? given : given.contiguous()),
      data(static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()))),
      bytes(static_cast<int64_t>(tensor.element_size())),
      pitch(tensor.stride(0) * bytes) {
  for (const int64_t size : tensor.sizes().slice(1)) bytes *= size;
}

std::string name_of_rows(const char* op, const at::Tensor& rows, int64_t experts) {
  return name_call(op, rows.scalar_type(), rows.sizes().slice(1),
                   std::to_string(experts) + " experts");
}

at::Tensor factors_for(const at::Tensor& weights, at::ScalarType dtype) {
  if (!weights.defined()) return weights;
  return weights.to(dtype == at::kDouble ? at::kDouble : at::kFloat).contiguous();
}

void add_up_rows(const Routing& routing, const std::vector<const char*>& row_at,
                 const at::Tensor& factors, int64_t top_k, at::Tensor& out) {
  const int64_t count = out.size(0), width = count == 0 ? 0 : out.numel() / count;
  if (width == 0) return;
  std::vector<const char*> rows(static_cast<size_t>(routing.pairs()));
  for (int64_t pair = 0; pair < routing.pairs(); ++pair)
    if (routing.place(pair) >= 0) rows[pair] = row_at[routing.place(pair)];
  const RowSums sums{out.mutable_data_ptr(),
                     rows.data(),
                     factors.defined() ? factors.const_data_ptr() : nullptr,
                     top_k,
                     width,
                     static_cast<DType>(out.scalar_type())};
  const int64_t grain = std::max<int64_t>(1, (int64_t{32} << 10) / width);
  parallel_for(0, count, grain, [&](int64_t first, int64_t last) { add_rows(sums, first, last); });
}

// --- Combination -----------------------------------------------------------------------------

Combination::Combination(const Routing& routing, const at::Tensor& rows, at::Tensor factors,
                         int64_t top_k, at::Tensor out)
    : routing_(routing),
      input_(rows),
      factors_(std::move(factors)),
      top_k_(top_k),
      out_(std::move(out)),
      row_bytes_(static_cast<int64_t>(out_.element_size())),
      missing_(routing.ranks()),
      row_at_(static_cast<size_t>(routing.sent())) {
  for (const int64_t size : out_.sizes().slice(1)) row_bytes_ *= size;
}

void Combination::run(Group& group, std::string call_name) {
  Exchange exchange{};
  exchange.kind = ExchangeKind::kHandledAllToAll;
  exchange.call_name = std::move(call_name);
  exchange.handler = this;
  // A power of two, so that calls with more rows seldom need larger slots.
  const auto needed = std::max(routing_.most_rows() * row_bytes_, kPieceBytes);
  exchange.piece_bytes = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(needed)));
  for (int64_t peer = 0; peer < routing_.ranks(); ++peer) {
    const bool own = peer == routing_.rank();
    exchange.input.push_back({nullptr, own ? 0 : routing_.taken(peer) * row_bytes_});
    exchange.output.push_back({nullptr, own ? 0 : routing_.given(peer) * row_bytes_});
  }
  try {
    symm_cp::run(group, std::move(exchange));
  } catch (...) {
    if (failure_) throw Failed(failure_);
    throw;
  }
}

void Combination::give(int peer, char* slot, SlotStores& stores) {
  const int64_t count = routing_.taken(peer), bytes = count * row_bytes_;
  const int64_t* numbers = routing_.arriving(peer);
  stores.run(bytes, [&](bool past_caches) {
    divide_rows(count, bytes, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        copy_bytes(slot + numbers[i] * row_bytes_, input_.data + numbers[i] * input_.pitch,
                   row_bytes_, past_caches, true);
    });
    return bytes;
  });
}

void Combination::keep() { rows_at(routing_.rank(), input_.data, input_.pitch); }
void Combination::take(int peer, const char* slot) { rows_at(peer, slot, row_bytes_); }

void Combination::rows_at(int64_t owner, const char* data, int64_t pitch) {
  int64_t place = routing_.begin(owner);
  const int64_t first = owner * routing_.local();
  for (int64_t e = first; e < first + routing_.local(); ++e)
    for (int64_t i = 0; i < routing_.count(routing_.rank(), e); ++i)
      row_at_[place++] = data + (routing_.first_row(routing_.rank(), e) + i) * pitch;
  if (--missing_ > 0) return;
  try {
    add_up_rows(routing_, row_at_, factors_, top_k_, out_);
  } catch (const std::exception& error) {
    failure_ = std::current_exception();
    throw std::runtime_error(describe(error));
  }
}

}  // namespace symm_cp::experts
