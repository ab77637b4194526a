// Which token goes to which expert, as all ranks know it once they have told each other how many
// tokens they have for each expert: what the kernels of experts.cpp and grouped_matmuls.cpp share.
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

// Returns the number of experts of a rank; raises ValueError unless the ranks can divide them.
int64_t experts_of_rank(const char* op, int64_t experts, int64_t ranks);

// The table of a routing: how many tokens each rank sends to each expert, then for each pair of a
// token of this rank and one of its experts, when it is sent. Raises ValueError or TypeError for a
// tensor that is none.
class Routing {
 public:
  Routing(const char* op, const at::Tensor& table, int64_t experts, const Group& group);

  int64_t ranks() const { return ranks_; }
  int64_t rank() const { return rank_; }
  int64_t experts() const { return experts_; }
  // Of a rank, in order.
  int64_t local() const { return local_; }
  // How many tokens of a rank an expert gets, and the first of their rows among those of all
  // experts of its rank.
  int64_t count(int64_t rank, int64_t expert) const { return counts_[rank * experts_ + expert]; }
  int64_t first_row(int64_t rank, int64_t expert) const {
    return first_rows_[rank * experts_ + expert];
  }
  int64_t pairs() const { return pairs_; }
  int64_t place(int64_t pair) const { return places_[pair]; }
  // What this rank sends to `peer` begins here, of all that it sends.
  int64_t begin(int64_t peer) const { return begins_[peer]; }
  int64_t given(int64_t peer) const { return begins_[peer + 1] - begins_[peer]; }
  int64_t taken(int64_t peer) const { return static_cast<int64_t>(arriving_[peer].size()); }
  int64_t sent() const { return sent_; }
  // The most rows that any rank gets for its experts: the same on all ranks.
  int64_t most_rows() const { return most_rows_; }
  // How many rows this rank's experts get, and which of them are those of a rank's tokens.
  int64_t rows() const { return rows_; }
  const int64_t* arriving(int64_t peer) const { return arriving_[peer].data(); }
  // The tokens of all that is sent.
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

// Rows with their elements side by side, and how far apart they begin.
struct TokenRows {
  at::Tensor tensor;
  char* data;
  int64_t bytes, pitch;

  explicit TokenRows(const at::Tensor& given);
  Extent extent(int64_t count, const int64_t* numbers) const {
    return {data, count * bytes, bytes, pitch, numbers};
  }
};

// What all ranks' calls have in common.
std::string name_of_rows(const char* op, const at::Tensor& rows, int64_t experts,
                         const std::string& detail = "");

// Each rank's data lies in its slot as a whole up to this size, beyond it goes through in pieces:
// slots stay, and there are two.
constexpr int64_t kMostSlotBytes = int64_t{256} << 20;
// The size of slots for so many bytes, a power of two: other loads seldom need larger ones.
int64_t slot_bytes_for(int64_t bytes);

// Rows from their tokens to their experts, through the slots in pieces.
at::Tensor dispatch_rows(Group& group, const at::Tensor& tokens, const at::Tensor& table,
                         int64_t rows, int64_t top_k, int64_t experts,
                         const char* op = kDispatchRows);
void check_dispatch(const char* op, const at::Tensor& tokens, int64_t rows, int64_t top_k,
                    const Routing& routing);

// Results of experts back to their tokens, weighted and added.
void check_combine(const char* op, const at::Tensor& rows, const at::Tensor& weights,
                   const Routing& routing, int64_t top_k);
at::Tensor combine_rows(Group& group, const at::Tensor& rows, const at::Tensor& weights,
                        const at::Tensor& table, int64_t top_k, int64_t experts,
                        const char* op = kCombineRows);
// The weights in the type in which rows of a dtype are added.
at::Tensor factors_for(const at::Tensor& weights, at::ScalarType dtype);

// out[t] = factors[t, 0] * (row of pair t, 0) + factors[t, 1] * ..., in this order; `row_at` are
// the rows in the order in which their tokens were sent.
void add_up_rows(const Routing& routing, const std::vector<const char*>& row_at,
                 const at::Tensor& factors, int64_t top_k, at::Tensor& out);

// An exchange of which the caller writes and reads the slots.
class SlotCall : public SlotHandler {
 public:
  // Carries out a call in which this rank has `given[p]` bytes for rank p and gets `taken[p]`.
  // Throws Failed with what a function of this object has thrown.
  void run(Group& group, std::string call_name, int64_t slot_bytes,
           const std::vector<int64_t>& given, const std::vector<int64_t>& taken);

  void give(int peer, char* slot, SlotStores& stores) override;
  void keep() override;
  void take(int peer, const char* slot) override;

 protected:
  virtual void write(int peer, char* slot, SlotStores& stores) = 0;
  virtual void work() = 0;
  virtual void read(int peer, const char* slot) = 0;

 private:
  void guarded(const std::function<void()>& body);
  std::exception_ptr failure_;
};

// Brings the results of this rank's experts back, which lie in the slots in the order of their
// rows, and adds them up once those of all ranks are there.
class Combination : public SlotCall {
 public:
  // `out` gets the sums.
  Combination(const Routing& routing, at::Tensor factors, int64_t top_k, at::Tensor out);
  void run(Group& group, std::string call_name);
  int64_t row_bytes() const { return row_bytes_; }

 protected:
  void read(int peer, const char* slot) override;
  // Where the results for this rank's own tokens are: row r of this rank's experts is at
  // `data + r * pitch`.
  void own_rows_at(const char* data, int64_t pitch);
  const Routing& routing_;

 private:
  // Adds all rows up once those of the last owner are there.
  void rows_at(int64_t owner, const char* data, int64_t pitch);

  at::Tensor factors_;
  int64_t top_k_;
  at::Tensor out_;
  int64_t row_bytes_;
  int64_t missing_;  // ranks whose rows have not arrived
  std::vector<const char*> row_at_;
};

}  // namespace symm_cp::experts
