// The steps of a split model for each generated token, without gradients, as one call each: linears
// and embeddings (symm_cp/tensor_parallel/) and the comparison of inputs
// (symm_cp/ops/equal_inputs.py). Between these calls megabytes of weights evict the caches, so
// Python's look-ups for one call take as long as a matmul with one row. Each function returns None
// for a case that it does not handle, such as subclasses and modes. Part of the library that needs
// Python's headers (backend/glue.cpp).
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "base/glue.h"
#include "ops/python_arguments.h"

namespace {

// Whether an object is a tensor in ordinary CPU memory, such as a parameter, that no subclass or
// transform interprets.
bool is_plain(PyObject* object) {
  using c10::DispatchKey;
  static const c10::DispatchKeySet usual{DispatchKey::CPU, DispatchKey::AutogradCPU,
                                         DispatchKey::AutocastCPU, DispatchKey::ADInplaceOrView};
  return object != nullptr && THPVariable_CheckExact(object) &&
         (THPVariable_Unpack(object).key_set().raw_repr() & ~usual.raw_repr()) == 0;
}

// Returns this rank's part of a parameter, a DTensor or not; undefined unless the part is a plain
// tensor.
at::Tensor own(PyObject* parameter) {
  if (is_plain(parameter)) return THPVariable_Unpack(parameter);
  static PyObject* const name = PyUnicode_InternFromString("_local_tensor");
  PyObject* const local = parameter == nullptr ? nullptr : PyObject_GetAttr(parameter, name);
  PyErr_Clear();
  const at::Tensor part = is_plain(local) ? THPVariable_Unpack(local) : at::Tensor();
  Py_XDECREF(local);
  return part;
}

bool no_modes() {
  return !at::impl::torch_function_mode_enabled() &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

bool may_compute() {
  return !at::GradMode::is_enabled() && !at::autocast::is_autocast_enabled(at::kCPU) && no_modes();
}

const char* text_of(PyObject* text) {
  const char* const bytes = PyUnicode_AsUTF8(text);
  if (bytes == nullptr) throw python_error();
  return bytes;
}

at::Tensor first_result(const c10::OperatorHandle& op, torch::jit::Stack stack) {
  op.callBoxed(stack);
  return std::move(stack[0]).toTensor();
}

// --- linears -------------------------------------------------------------------------------------

// Like `linear` of symm_cp/tensor_parallel/replicated.py.
at::Tensor linear_of(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto added = bias.defined() ? std::optional(bias) : std::nullopt;
  if (x.dim() != 3 || x.stride(0) == x.size(1) * x.stride(1)) return at::linear(x, weight, added);
  const at::Tensor rows = at::linear(x.flatten(0, 1), weight, added);
  return rows.view({x.size(0), x.size(1), weight.size(0)});
}

at::Tensor sum_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      const std::string& group) {
  static const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("symm_mem::fused_matmul_all_reduce", "");
  return first_result(
      op, {x, weight.t(), bias.defined() ? c10::IValue(bias) : c10::IValue(), "sum", group});
}

// Arguments: the linear's dict of parameters, the input (..., K), K, and the name of the group over
// which products are summed, or None.
PyObject* linear(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  PyObject *const parameters = given[0], *const input = given[1], *const group = given[3];
  if (!may_compute() || !is_plain(input)) Py_RETURN_NONE;
  const at::Tensor& x = THPVariable_Unpack(input);
  if (x.dim() < 2 || x.size(-1) != PyLong_AsLongLong(given[2])) Py_RETURN_NONE;
  static PyObject* const weight_name = PyUnicode_InternFromString("weight");
  static PyObject* const bias_name = PyUnicode_InternFromString("bias");
  const at::Tensor weight = own(PyDict_GetItem(parameters, weight_name));
  PyObject* const added = PyDict_GetItem(parameters, bias_name);
  const at::Tensor bias = added == Py_None ? at::Tensor() : own(added);
  if (!weight.defined() || (!bias.defined() && added != Py_None)) Py_RETURN_NONE;
  at::Tensor output;
  if (group != Py_None) {
    const std::string name = text_of(group);
    const pybind11::gil_scoped_release without_gil;
    output = sum_linear(x, weight, bias, name);
  } else {
    const pybind11::gil_scoped_release without_gil;
    output = linear_of(x, weight, bias);
  }
  return THPVariable_Wrap(output);
  END_HANDLE_TH_ERRORS
}

// --- embeddings ----------------------------------------------------------------------------------

// Returns the tokens' rows of `weight`, whose first row belongs to token `start`; zeros for tokens
// of other ranks.
at::Tensor rows_of(const at::Tensor& tokens, const at::Tensor& weight, int64_t start) {
  const at::Tensor found = at::empty({tokens.numel(), weight.size(1)}, weight.options());
  const auto* const token = tokens.const_data_ptr<int64_t>();
  const size_t bytes = weight.size(1) * weight.element_size();
  const auto* const from = static_cast<const char*>(weight.const_data_ptr());
  auto* const to = static_cast<char*>(found.data_ptr());
  for (int64_t i = 0; i < tokens.numel(); ++i) {
    const int64_t row = token[i] - start;
    if (row >= 0 && row < weight.size(0))
      std::memcpy(to + i * bytes, from + row * bytes, bytes);
    else
      std::memset(to + i * bytes, 0, bytes);
  }
  return found;
}

// Larger numbers of tokens are left to torch, which looks them up in several threads.
constexpr int64_t kMostTokens = 64;

bool are_known(const at::Tensor& tokens, int64_t length) {
  if (tokens.scalar_type() != at::kLong || !tokens.is_contiguous() || tokens.numel() == 0 ||
      tokens.numel() > kMostTokens)
    return false;
  const auto* const token = tokens.const_data_ptr<int64_t>();
  return std::all_of(token, token + tokens.numel(),
                     [&](int64_t id) { return id >= 0 && id < length; });
}

// Arguments: the embedding's dict of parameters, the tokens, the first token of this rank, the
// length of the vocabulary, and the name of the group.
PyObject* embedding(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  if (!may_compute() || !is_plain(given[1])) Py_RETURN_NONE;
  const at::Tensor& tokens = THPVariable_Unpack(given[1]);
  static PyObject* const weight_name = PyUnicode_InternFromString("weight");
  const at::Tensor weight = own(PyDict_GetItem(given[0], weight_name));
  if (!are_known(tokens, PyLong_AsLongLong(given[3])) || !weight.defined() || weight.dim() != 2 ||
      !weight.is_contiguous())
    Py_RETURN_NONE;
  const int64_t start = PyLong_AsLongLong(given[2]);
  const std::string group = text_of(given[4]);
  at::DimVector shape(tokens.sizes());
  shape.push_back(weight.size(1));
  at::Tensor output;
  {
    const pybind11::gil_scoped_release without_gil;
    static const c10::OperatorHandle op =
        c10::Dispatcher::singleton().findSchemaOrThrow("symm_mem::_fused_matmuls_all_reduce", "");
    const c10::List<at::Tensor> no_factors;
    output = first_result(
        op, {no_factors, no_factors, rows_of(tokens, weight, start), c10::IValue(), "sum", group});
  }
  return THPVariable_Wrap(output.view(shape));
  END_HANDLE_TH_ERRORS
}

// --- comparison of inputs ------------------------------------------------------------------------

class Hash {
 public:
  void add(uint64_t word) {
    number_ = (number_ ^ word) * 0x9E3779B97F4A7C15;
    number_ ^= number_ >> 32;
  }
  void add(const void* bytes, size_t count) {
    add(count);
    for (size_t at = 0; at < count; at += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, static_cast<const char*>(bytes) + at, std::min(sizeof word, count - at));
      add(word);
    }
  }
  // Returns 56 bits of the hash in two pieces of 28: sums of pieces over the ranks do not overflow.
  std::pair<int64_t, int64_t> pieces() const {
    return {number_ >> 36, (number_ >> 8) & ((uint64_t{1} << 28) - 1)};
  }

 private:
  uint64_t number_ = 0;
};

// Whether a tensor holds integers and is small.
bool is_countable(const at::Tensor& tensor) {
  constexpr int64_t kMostBytes = 4096;
  return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true) && tensor.is_contiguous() &&
         static_cast<int64_t>(tensor.nbytes()) <= kMostBytes;
}

// Arguments: the input, text that must be equal as well, the name of the group and its size.
// Returns whether input and text are equal on all ranks. A peer that gets None sums zeros in the
// same call (equal_inputs.py), so the sums do not match and all ranks compare everything.
PyObject* agree(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  if (!no_modes() || !is_plain(given[0])) Py_RETURN_NONE;
  const at::Tensor& input = THPVariable_Unpack(given[0]);
  if (!is_countable(input)) Py_RETURN_NONE;
  Hash hash;
  hash.add(static_cast<uint64_t>(input.scalar_type()));
  hash.add(input.sizes().data(), input.dim() * sizeof(int64_t));
  hash.add(input.const_data_ptr(), input.nbytes());
  const std::string further = text_of(given[1]), group = text_of(given[2]);
  hash.add(further.data(), further.size());
  const auto [first, second] = hash.pieces();
  const int64_t size = PyLong_AsLongLong(given[3]);
  bool equal = false;
  {
    const pybind11::gil_scoped_release without_gil;
    const c10::InferenceMode ordinary(false);
    static const c10::OperatorHandle op =
        c10::Dispatcher::singleton().findSchemaOrThrow("symm_mem::_one_shot_all_reduce", "");
    const at::Tensor sums =
        first_result(op, {at::tensor({first, second}, at::kLong), "sum", group});
    const auto* const sum = sums.const_data_ptr<int64_t>();
    equal = sum[0] == first * size && sum[1] == second * size;
  }
  return PyBool_FromLong(equal);
  END_HANDLE_TH_ERRORS
}

PyMethodDef kFunctions[] = {
    {"linear", reinterpret_cast<PyCFunction>(linear), METH_FASTCALL, nullptr},
    {"embedding", reinterpret_cast<PyCFunction>(embedding), METH_FASTCALL, nullptr},
    {"agree", reinterpret_cast<PyCFunction>(agree), METH_FASTCALL, nullptr}};

}  // namespace

// Returns a new reference to one of the functions above.
SYMM_CP_EXPORT PyObject* symm_cp_decoding(int number) {
  return PyCFunction_New(&kFunctions[number], nullptr);
}
