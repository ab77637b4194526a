// The tensors of a call of the backend as bytes to exchange, and the name of the call.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend_work.h"
#include "channel/wire.h"

namespace symm_cp {

// The name of a call, which peers compare, such as "all_reduce sum float32[2, 4]". Built anew for
// each call, which is faster than looking it up.
class CallName {
 public:
  explicit CallName(const char* op) { *this << op; }
  CallName& operator<<(std::string_view part) {
    const size_t fits = std::min(part.size(), kMaxCallName - length_);
    std::memcpy(text_ + length_, part.data(), fits);
    length_ += fits;
    return *this;
  }
  CallName& operator<<(int64_t number);
  CallName& operator<<(at::ScalarType dtype);
  // dtype and shape. `rows`: sizes along dimension 0 may differ between ranks.
  CallName& describe(const at::Tensor& tensor, bool rows = false);
  std::string str() const { return {text_, length_}; }

 private:
  char text_[kMaxCallName];
  size_t length_ = 0;
};

// torch's enumerators have the same numbers. `dtype_of` throws if the operation does not support
// the dtype.
DType dtype_of(const char* op, const at::Tensor& tensor, const c10d::ReduceOp& reduce_op);
ReduceOp reduce_op_of(const c10d::ReduceOp& reduce_op);
const char* name_of(ReduceOp reduce_op);
const char* name_of(const c10d::ReduceOp& reduce_op);
// PREMUL_SUM sums every rank's tensor times that rank's factor. `summand` returns that product, a
// copy.
bool multiplies(const c10d::ReduceOp& reduce_op);
at::Tensor summand(const char* op, const at::Tensor& tensor, const c10d::ReduceOp& reduce_op);

// Throws ValueError or NotImplementedError unless a tensor is dense, on the CPU, and has memory.
void check_dense(const char* op, const char* argument, const at::Tensor& tensor);
// Throws ValueError unless both have the same dtype.
void check_same_dtype(const char* op, const at::Tensor& one, const at::Tensor& other);
// The only tensor of a list, which torch passes because a process once had several devices.
const at::Tensor& single(const char* op, const char* argument,
                         const std::vector<at::Tensor>& tensors);

// The values of a tensor; a copy of them unless the tensor is contiguous.
Extent bytes_read(Collective& collective, const at::Tensor& tensor);
// The memory to which an exchange writes a tensor's values: the tensor itself or, with `aside`,
// memory that is copied to the tensor after all exchanges. `read`: the exchange reads the values
// first.
Extent bytes_written(Collective& collective, const at::Tensor& tensor, bool read = false,
                     bool aside = false);

// The tensors of a call that takes lists. Exchange i reads `inputs[i]`, or `outputs[i]` if there
// are no inputs, and writes `outputs[i]`.
struct Lists {
  std::vector<std::vector<at::Tensor>> inputs;
  std::vector<std::vector<at::Tensor>> outputs;
};
// Whether an exchange writes memory that another exchange reads, or any memory is written twice.
// Then all results are written aside: all values are read first, and where tensors share memory the
// last tensor's values remain, as with gloo.
bool must_write_aside(const Lists& lists);

// Splits bytes into a part for each rank, in order.
std::vector<Extent> parts_of(const Extent& all, const std::vector<int64_t>& sizes);
std::vector<Extent> equal_parts_of(const Extent& all, int count);
// Splits bytes so that all parts but the last ones are equal, at multiples of kPartAlignment.
std::vector<Extent> aligned_parts_of(const Extent& all, int count);

// Copies aside each input that shares memory with an output, unless both belong to the same rank (a
// single input or output to `own`) and begin at the same address.
void separate(Collective& collective, Exchange& exchange, int own);

}  // namespace symm_cp
