#include "backend/backend_tensors.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <charconv>

#include "exchange/reduce.h"
#include "ops/kernels.h"

namespace symm_cp {

namespace {

constexpr const char* kReduceOpNames[] = {"sum", "avg",  "product", "min",
                                          "max", "band", "bor",     "bxor"};

const char* dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte: return "uint8";
    case at::kChar: return "int8";
    case at::kShort: return "int16";
    case at::kInt: return "int32";
    case at::kLong: return "int64";
    case at::kUInt16: return "uint16";
    case at::kUInt32: return "uint32";
    case at::kUInt64: return "uint64";
    case at::kHalf: return "float16";
    case at::kBFloat16: return "bfloat16";
    case at::kFloat: return "float32";
    case at::kDouble: return "float64";
    case at::kComplexHalf: return "complex32";
    case at::kComplexFloat: return "complex64";
    case at::kComplexDouble: return "complex128";
    case at::kBool: return "bool";
    case at::kFloat8_e4m3fn: return "float8_e4m3fn";
    case at::kFloat8_e5m2: return "float8_e5m2";
    case at::kFloat8_e4m3fnuz: return "float8_e4m3fnuz";
    case at::kFloat8_e5m2fnuz: return "float8_e5m2fnuz";
    default: return c10::toString(dtype);
  }
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor plain_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options().memory_format(std::nullopt));
}

// The memory of a tensor, from its first to its last element.
struct Span {
  const char* begin;
  const char* end;
  size_t exchange;
  bool written;
};

void add_spans(std::vector<Span>& spans, const std::vector<at::Tensor>& tensors, size_t exchange,
               bool written) {
  for (const at::Tensor& tensor : tensors) {
    // Other tensors are refused, or copied first.
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.numel() == 0) continue;
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim)
      last += (tensor.size(dim) - 1) * tensor.stride(dim);
    const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
    spans.push_back({begin, begin + (last + 1) * tensor.element_size(), exchange, written});
  }
}

bool extents_overlap(const Extent& one, const Extent& other) {
  const auto* a = static_cast<const char*>(one.data);
  const auto* b = static_cast<const char*>(other.data);
  return a < b + other.bytes && b < a + one.bytes;
}

}  // namespace

CallName& CallName::operator<<(int64_t number) {
  char digits[24];
  const auto end = std::to_chars(digits, digits + sizeof(digits), number).ptr;
  return *this << std::string_view(digits, static_cast<size_t>(end - digits));
}

CallName& CallName::operator<<(at::ScalarType dtype) { return *this << dtype_name(dtype); }

CallName& CallName::describe(const at::Tensor& tensor, bool rows) {
  *this << " " << tensor.scalar_type() << "[";
  const auto sizes = tensor.sizes();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > 0) *this << ", ";
    if (rows && i == 0)
      *this << "*";
    else
      *this << sizes[i];
  }
  return *this << "]";
}

const char* name_of(ReduceOp reduce_op) { return kReduceOpNames[static_cast<int>(reduce_op)]; }

ReduceOp reduce_op_of(const c10d::ReduceOp& reduce_op) {
  static_assert(static_cast<int>(ReduceOp::kBxor) == c10d::ReduceOp::BXOR &&
                static_cast<int>(ReduceOp::kAvg) == c10d::ReduceOp::AVG);
  return multiplies(reduce_op) ? ReduceOp::kSum : static_cast<ReduceOp>(reduce_op.op_);
}

bool multiplies(const c10d::ReduceOp& reduce_op) {
  return reduce_op.op_ == c10d::ReduceOp::PREMUL_SUM;
}

const char* name_of(const c10d::ReduceOp& reduce_op) {
  return multiplies(reduce_op) ? "premul_sum" : name_of(reduce_op_of(reduce_op));
}

at::Tensor summand(const char* op, const at::Tensor& tensor, const c10d::ReduceOp& reduce_op) {
  if (!multiplies(reduce_op)) return tensor;
  TORCH_CHECK_TYPE(at::isFloatingType(tensor.scalar_type()), op,
                   ": ReduceOp.PREMUL_SUM takes floating-point tensors, not ",
                   dtype_name(tensor.scalar_type()));
  const auto* factor =
      dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(reduce_op.supplement_.get());
  TORCH_CHECK_VALUE(factor != nullptr, op, ": ReduceOp.PREMUL_SUM must have a factor");
  const at::AutoDispatchBelowADInplaceOrView guard;
  if (!factor->tensor_factor.defined()) return tensor.mul(factor->double_factor);
  return tensor.mul(factor->tensor_factor.to(tensor.options()).reshape({}));
}

DType dtype_of(const char* op, const at::Tensor& tensor, const c10d::ReduceOp& reduce_op) {
  const ReduceOp operation = reduce_op_of(reduce_op);
  const auto dtype = static_cast<DType>(tensor.scalar_type());
  static_assert(static_cast<int>(at::kBFloat16) == static_cast<int>(DType::kBfloat16) &&
                static_cast<int>(at::kBool) == static_cast<int>(DType::kBool));
  TORCH_CHECK_NOT_IMPLEMENTED(reducible(dtype, operation), op, ": ", name_of(operation), " of ",
                              dtype_name(tensor.scalar_type()), " tensors is not supported");
  return dtype;
}

void check_dense(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), op, ": ", argument, " is undefined");
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, op, ": ", argument,
                              " must be dense, not ", tensor.layout(),
                              "; use its to_dense(), or a group of backend gloo");
  TORCH_CHECK_NOT_IMPLEMENTED(!tensor.is_nested() && !tensor.is_quantized(), op, ": ", argument,
                              " must be dense, not ", tensor.is_nested() ? "nested" : "quantized");
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), op, ": ", argument, " must be on the CPU, not on ",
                    tensor.device());
  kernels::check_memory(op, argument, tensor);
}

void check_same_dtype(const char* op, const at::Tensor& one, const at::Tensor& other) {
  TORCH_CHECK_VALUE(one.scalar_type() == other.scalar_type(), op,
                    ": all tensors must have the same dtype, not ", dtype_name(one.scalar_type()),
                    " and ", dtype_name(other.scalar_type()));
}

const at::Tensor& single(const char* op, const char* argument,
                         const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, op, ": ", argument, " must be one tensor, not ",
                    tensors.size());
  check_dense(op, argument, tensors[0]);
  return tensors[0];
}

Extent bytes_read(Collective& collective, const at::Tensor& tensor) {
  at::Tensor values = tensor;
  if (!is_plain(tensor)) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    values = plain_like(tensor);
    values.copy_(tensor);
  }
  const Extent extent{const_cast<void*>(values.const_data_ptr()),
                      static_cast<int64_t>(values.nbytes())};
  collective.kept.push_back(std::move(values));
  return extent;
}

Extent bytes_written(Collective& collective, const at::Tensor& tensor, bool read, bool aside) {
  at::Tensor values = tensor;
  if (aside || !is_plain(tensor)) {
    TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                      "a tensor that is written must not be expanded: sizes ", tensor.sizes(),
                      ", strides ", tensor.strides());
    const at::AutoDispatchBelowADInplaceOrView guard;
    values = plain_like(tensor);
    if (read) values.copy_(tensor);
    collective.results.emplace_back(tensor, values);
  }
  const Extent extent{values.mutable_data_ptr(), static_cast<int64_t>(values.nbytes())};
  collective.kept.push_back(std::move(values));
  return extent;
}

bool must_write_aside(const Lists& lists) {
  std::vector<Span> spans;
  for (size_t i = 0; i < lists.inputs.size(); ++i) add_spans(spans, lists.inputs[i], i, false);
  for (size_t i = 0; i < lists.outputs.size(); ++i) add_spans(spans, lists.outputs[i], i, true);
  std::sort(spans.begin(), spans.end(),
            [](const Span& one, const Span& other) { return one.begin < other.begin; });
  for (size_t i = 0; i < spans.size(); ++i)
    for (size_t j = i + 1; j < spans.size() && spans[j].begin < spans[i].end; ++j) {
      const Span &one = spans[i], &other = spans[j];
      // `separate` handles overlaps within one exchange.
      if (one.written && other.written) return true;
      if ((one.written || other.written) && one.exchange != other.exchange) return true;
    }
  return false;
}

std::vector<Extent> parts_of(const Extent& all, const std::vector<int64_t>& sizes) {
  std::vector<Extent> parts;
  parts.reserve(sizes.size());
  char* at = static_cast<char*>(all.data);
  for (const int64_t size : sizes) {
    parts.push_back({at, size});
    at += size;
  }
  return parts;
}

std::vector<Extent> equal_parts_of(const Extent& all, int count) {
  std::vector<Extent> parts(static_cast<size_t>(count));
  const int64_t size = all.bytes / count;
  for (int i = 0; i < count; ++i) parts[i] = {static_cast<char*>(all.data) + i * size, size};
  return parts;
}

std::vector<Extent> aligned_parts_of(const Extent& all, int count) {
  const int64_t even = (all.bytes + count - 1) / count;
  const int64_t size = (even + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
  std::vector<Extent> parts(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    const int64_t begin = std::min(i * size, all.bytes);
    parts[i] = {static_cast<char*>(all.data) + begin, std::min(size, all.bytes - begin)};
  }
  return parts;
}

void separate(Collective& collective, Exchange& exchange, int own) {
  const size_t inputs = exchange.input.size(), outputs = exchange.output.size();
  const auto conflicts = [&](size_t i) {
    const Extent& input = exchange.input[i];
    for (size_t j = 0; j < outputs; ++j) {
      const Extent& output = exchange.output[j];
      const size_t giver = inputs == 1 ? static_cast<size_t>(own) : i;
      const size_t taker = outputs == 1 ? static_cast<size_t>(own) : j;
      const bool in_place = giver == taker && input.data == output.data;
      if (!in_place && extents_overlap(input, output)) return true;
    }
    return false;
  };
  for (size_t i = 0; i < inputs; ++i) {
    Extent& input = exchange.input[i];
    if (input.bytes == 0 || !conflicts(i)) continue;
    at::Tensor copy = at::empty({input.bytes}, at::kByte);
    std::memcpy(copy.mutable_data_ptr(), input.data, static_cast<size_t>(input.bytes));
    input.data = copy.mutable_data_ptr();
    collective.kept.push_back(std::move(copy));
  }
}

}  // namespace symm_cp
