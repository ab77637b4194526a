// The routing of tokens to experts. All ranks can compute it once they have exchanged the number of
// tokens that each has for each expert. Shared by experts.cpp and grouped_matmuls.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "ops/kernels.h"

namespace symm_cp::experts {

constexpr const char* kDispatchRows = "dispatch_to_experts";
constexpr const char* kCombineRows = "combine_from_experts";
constexpr int64_t kDropped = -1;

// Returns the number of experts per rank; raises ValueError unless `experts` is divisible by
// `ranks`.
int64_t experts_of_rank(const char* op, int64_t experts, int64_t ranks);
// The same; also raises ValueError or TypeError for a tensor that is no table of a routing.
int64_t check_table(const char* op, const at::Tensor& table, int64_t experts, int64_t ranks);

// A routing, read from its table: the number of tokens that each rank sends to each expert, then
// the place in sending order of each pair of a token of this rank and one of the token's experts.
// Raises ValueError or TypeError if the tensor is not such a table.
class Routing {
 public:
  Routing(const char* op, const at::Tensor& table, int64_t experts, const Group& group);

  int64_t ranks() const { return ranks_; }
  int64_t rank() const { return rank_; }
  int64_t experts() const { return experts_; }
  // The number of experts per rank; expert e belongs to rank e / local().
  int64_t local() const { return local_; }
  // The number of tokens that a rank sends to an expert, and their first row among the rows of all
  // experts on the expert's rank.
  int64_t count(int64_t rank, int64_t expert) const { return counts_[rank * experts_ + expert]; }
  int64_t first_row(int64_t rank, int64_t expert) const {
    return first_rows_[rank * experts_ + expert];
  }
  int64_t pairs() const { return pairs_; }
  int64_t place(int64_t pair) const { return places_[pair]; }
  // The first row for `peer` among all rows that this rank sends.
  int64_t begin(int64_t peer) const { return begins_[peer]; }
  int64_t given(int64_t peer) const { return begins_[peer + 1] - begins_[peer]; }
  int64_t taken(int64_t peer) const { return static_cast<int64_t>(arriving_[peer].size()); }
  int64_t sent() const { return sent_; }
  // The most rows that any rank gets for its experts: the same on all ranks.
  int64_t most_rows() const { return most_rows_; }
  // The number of rows that this rank's experts get, and the numbers of the rows that come from a
  // peer.
  int64_t rows() const { return rows_; }
  const int64_t* arriving(int64_t peer) const { return arriving_[peer].data(); }
  // The token of each sent row.
  std::vector<int64_t> tokens(int64_t top_k) const;

 private:
  void read_pairs(const char* op);
  void place_rows();

  int64_t ranks_, rank_, experts_, local_;
  const int64_t* counts_ = nullptr;
  const int64_t* places_ = nullptr;
  int64_t pairs_ = 0, sent_ = 0, rows_ = 0, most_rows_ = 0;
  std::vector<int64_t> pair_at_, begins_, first_rows_;
  std::vector<std::vector<int64_t>> arriving_;
};

// Rows with contiguous elements; consecutive rows begin `pitch` bytes apart.
struct TokenRows {
  at::Tensor tensor;
  char* data;
  int64_t bytes, pitch;

  explicit TokenRows(const at::Tensor& given);
  Extent extent(int64_t count, const int64_t* numbers) const {
    return {data, count * bytes, bytes, pitch, numbers};
  }
};

// Names the part of a call that all ranks have in common.
std::string name_of_rows(const char* op, const at::Tensor& rows, int64_t experts);

// Up to this size a rank's data goes through its slot as a whole, above it in pieces. The size is
// limited because there are two slots and they stay allocated.
constexpr int64_t kMostSlotBytes = int64_t{256} << 20;

// Returns the weights in the dtype in which rows of `dtype` are added.
at::Tensor factors_for(const at::Tensor& weights, at::ScalarType dtype);

// out[t] = factors[t, 0] * (row of pair t, 0) + factors[t, 1] * ..., in this order; `row_at` has
// the rows in the order in which their tokens were sent.
void add_up_rows(const Routing& routing, const std::vector<const char*>& row_at,
                 const at::Tensor& factors, int64_t top_k, at::Tensor& out);

// Brings the experts' results back to this rank's tokens, and adds them up once the results of all
// ranks are there. The slots hold results in the order of the experts' rows.
class Combination : public SlotHandler {
 public:
  // The sums go to `out`.
  Combination(const Routing& routing, const at::Tensor& rows, at::Tensor factors, int64_t top_k,
              at::Tensor out);
  // If adding up throws, throws Failed with that exception.
  void run(Group& group, std::string call_name);
  int64_t row_bytes() const { return row_bytes_; }

  void give(int peer, char* slot, SlotStores& stores) override;
  void keep() override;
  void take(int peer, const char* slot) override;

 private:
  // Adds up all rows once the last owner's rows are there: row r of its experts is at `data + r *
  // pitch`.
  void rows_at(int64_t owner, const char* data, int64_t pitch);

  const Routing& routing_;
  TokenRows input_;
  at::Tensor factors_;
  int64_t top_k_;
  at::Tensor out_;
  int64_t row_bytes_;
  int64_t missing_;  // ranks whose rows have not arrived
  std::vector<const char*> row_at_;
  std::exception_ptr failure_;
};

}  // namespace symm_cp::experts
