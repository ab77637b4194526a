#include "backend/backend_sparse.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "backend/backend_tensors.h"
#include "base/error.h"

namespace symm_cp {

namespace {

// Each rank's data begins at a multiple of this many bytes, the alignment of any dtype's elements.
constexpr int64_t kAlignment = 16;

// Coordinates and values of all ranks. A rank gives its coordinates, then its values.
class Terms {
 public:
  Terms(const at::Tensor& tensor, int world_size)
      : tensor_(tensor), own_(tensor.coalesce()), counts_(static_cast<size_t>(world_size), -1) {
    own_count_ = own_._nnz();
    index_bytes_ = tensor.sparse_dim() * static_cast<int64_t>(sizeof(int64_t));
    const at::IntArrayRef sizes = tensor.sizes();
    value_sizes_.assign(sizes.begin() + tensor.sparse_dim(), sizes.end());
    value_bytes_ = std::accumulate(value_sizes_.begin(), value_sizes_.end(),
                                   static_cast<int64_t>(tensor.element_size()), std::multiplies());
  }

  // The exchange of the numbers of values.
  void count(Exchange& exchange) {
    constexpr int64_t bytes = sizeof(int64_t);
    exchange.input = {{&own_count_, bytes}};
    for (int64_t& count : counts_) exchange.output.push_back({&count, bytes});
  }

  // The exchange of coordinates and values, once the numbers are known.
  void gather(Exchange& exchange) {
    std::vector<int64_t> sizes;
    for (const int64_t count : counts_) {
      if (count < 0)
        throw PeerError(exchange.call_name + ": the ranks could not exchange their sizes");
      sizes.push_back(bytes_of(count));
    }
    given_ = at::zeros({bytes_of(own_count_)}, at::kByte);
    taken_ = at::empty({std::accumulate(sizes.begin(), sizes.end(), int64_t{0})}, at::kByte);
    if (own_count_ > 0) {
      auto* to = static_cast<char*>(given_.mutable_data_ptr());
      const at::Tensor indices = own_._indices().contiguous(), values = own_._values().contiguous();
      std::memcpy(to, indices.const_data_ptr(), indices.nbytes());
      std::memcpy(to + indices.nbytes(), values.const_data_ptr(), values.nbytes());
    }
    exchange.input = {{given_.mutable_data_ptr(), static_cast<int64_t>(given_.nbytes())}};
    exchange.output =
        parts_of({taken_.mutable_data_ptr(), static_cast<int64_t>(taken_.nbytes())}, sizes);
  }

  void add() {
    std::vector<at::Tensor> indices, values;
    auto* from = static_cast<char*>(taken_.mutable_data_ptr());
    for (const int64_t count : counts_) {
      std::vector<int64_t> sizes{count};
      sizes.insert(sizes.end(), value_sizes_.begin(), value_sizes_.end());
      indices.push_back(at::from_blob(from, {tensor_.sparse_dim(), count}, at::kLong));
      values.push_back(at::from_blob(from + count * index_bytes_, sizes, tensor_.scalar_type()));
      from += bytes_of(count);
    }
    tensor_.copy_(
        at::_sparse_coo_tensor_unsafe(at::cat(indices, 1), at::cat(values, 0), tensor_.sizes())
            .coalesce());
  }

 private:
  int64_t bytes_of(int64_t count) const {
    const int64_t bytes = count * (index_bytes_ + value_bytes_);
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  at::Tensor tensor_, own_;
  int64_t own_count_ = 0;
  std::vector<int64_t> counts_;  // by rank; -1: not known yet
  int64_t index_bytes_ = 0, value_bytes_ = 0;
  std::vector<int64_t> value_sizes_;
  at::Tensor given_, taken_;
};

}  // namespace

bool is_sparse(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kSparse;
}

void add_sparse_sum(Collective& collective, const char* op, const at::Tensor& tensor,
                    const c10d::ReduceOp& reduce_op, int world_size) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), op, ": tensor must be on the CPU, not on ",
                    tensor.device());
  TORCH_CHECK_NOT_IMPLEMENTED(reduce_op.op_ == c10d::ReduceOp::SUM, op, ": ", name_of(reduce_op),
                              " of sparse tensors is not supported, only sum; or use to_dense()");
  const at::AutoDispatchBelowADInplaceOrView guard;
  auto terms = std::make_shared<Terms>(tensor, world_size);
  CallName name(op);
  name << " sum of " << tensor.sparse_dim() << " sparse dimensions";
  Exchange counts{};
  counts.kind = ExchangeKind::kAllGather;
  counts.call_name = name.describe(tensor).str();
  terms->count(counts);
  Exchange values{};
  values.kind = ExchangeKind::kAllGather;
  values.call_name = (name << ", values").str();
  values.complete = [terms](Exchange& exchange) { terms->gather(exchange); };
  collective.exchanges.push_back(std::move(counts));
  collective.exchanges.push_back(std::move(values));
  collective.conclude = [terms = std::move(terms)] { terms->add(); };
  collective.outputs = {tensor};
}

}  // namespace symm_cp
