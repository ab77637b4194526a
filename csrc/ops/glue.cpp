// Calls an op from Python in half the time that torch's own callable takes: arguments of the usual
// types are put on the stack by their positions, without a search among overloads. Part of the
// library that needs Python's headers (backend/glue.cpp).
//
// Whatever is not usual is left to torch's callable: subclasses of tensors, modes, other types of
// arguments, wrong ones.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

enum class Kind {
  kTensor,
  kTensors,
  kOptionalTensors,
  kInt,
  kInts,
  kOptionalInts,
  kFloat,
  kBool,
  kBools,
  kText,
  kOther
};

struct Argument {
  PyObject* name;
  Kind kind;
  bool optional;
  std::optional<c10::IValue> given_by_default;
};

// An object of Python, in which `op` and `arguments` live until the process ends.
struct OpCall {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* torchs;  // torch's own callable
  const c10::OperatorHandle* op;
  const std::vector<Argument>* arguments;
};

Kind kind_of_list(const c10::ListType& type) {
  const c10::TypePtr& element = type.getElementType();
  switch (element->kind()) {
    case c10::TypeKind::TensorType: return Kind::kTensors;
    case c10::TypeKind::IntType: return Kind::kInts;
    case c10::TypeKind::BoolType: return Kind::kBools;
    case c10::TypeKind::OptionalType: {
      const auto inner = element->expectRef<c10::OptionalType>().getElementType()->kind();
      if (inner == c10::TypeKind::TensorType) return Kind::kOptionalTensors;
      return inner == c10::TypeKind::IntType ? Kind::kOptionalInts : Kind::kOther;
    }
    default: return Kind::kOther;
  }
}

Kind kind_of(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return Kind::kTensor;
    case c10::TypeKind::IntType: return Kind::kInt;
    case c10::TypeKind::FloatType: return Kind::kFloat;
    case c10::TypeKind::BoolType: return Kind::kBool;
    case c10::TypeKind::StringType: return Kind::kText;
    case c10::TypeKind::ListType: return kind_of_list(type->expectRef<c10::ListType>());
    default: return Kind::kOther;
  }
}

Argument describe(const c10::Argument& argument) {
  const c10::TypePtr& type = argument.type();
  const bool optional = type->kind() == c10::TypeKind::OptionalType;
  const c10::TypePtr& inner =
      optional ? type->expectRef<c10::OptionalType>().getElementType() : type;
  return {PyUnicode_InternFromString(argument.name().c_str()), kind_of(inner), optional,
          argument.default_value()};
}

bool is_tensor(PyObject* given) { return THPVariable_CheckExact(given); }
const at::Tensor& to_tensor(PyObject* given) { return THPVariable_Unpack(given); }
bool is_number(PyObject* given) { return PyLong_CheckExact(given); }
// Sets Python's exception for a number that is too large.
int64_t to_number(PyObject* given) { return PyLong_AsLongLong(given); }
bool is_number_or_dtype(PyObject* given) { return is_number(given) || THPDtype_Check(given); }
int64_t to_number_or_dtype(PyObject* given) {
  if (!THPDtype_Check(given)) return to_number(given);
  return static_cast<int64_t>(reinterpret_cast<THPDtype*>(given)->scalar_type);
}
bool is_bool(PyObject* given) { return PyBool_Check(given); }
bool to_bool(PyObject* given) { return given == Py_True; }

// Appends a list or a tuple to the stack; false if one of its elements is of another type.
template <class Element, class Is, class To>
bool take_list(PyObject* given, std::vector<c10::IValue>& stack, Is is, To to) {
  if (!PyList_Check(given) && !PyTuple_Check(given)) return false;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(given);
  PyObject** const items = PySequence_Fast_ITEMS(given);
  c10::List<Element> elements;
  elements.reserve(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!is(items[i])) return false;
    elements.push_back(to(items[i]));
  }
  stack.emplace_back(std::move(elements));
  return true;
}

// The same of a list whose elements may be None.
template <class Element, class Is, class To>
bool take_optionals(PyObject* given, std::vector<c10::IValue>& stack, Is is, To to) {
  using Optional = std::optional<Element>;
  return take_list<Optional>(
      given, stack, [&](PyObject* item) { return item == Py_None || is(item); },
      [&](PyObject* item) { return item == Py_None ? Optional() : Optional(to(item)); });
}

// Appends an argument to the stack; false if it is for torch's callable.
bool take(const Argument& argument, PyObject* given, std::vector<c10::IValue>& stack) {
  if (given == nullptr) {
    if (!argument.given_by_default) return false;
    stack.push_back(*argument.given_by_default);
    return true;
  }
  if (given == Py_None) {
    if (argument.optional) stack.emplace_back();
    return argument.optional;
  }
  switch (argument.kind) {
    case Kind::kTensor:
      if (!is_tensor(given)) return false;
      stack.emplace_back(to_tensor(given));
      return true;
    case Kind::kTensors: return take_list<at::Tensor>(given, stack, is_tensor, to_tensor);
    case Kind::kOptionalTensors:
      return take_optionals<at::Tensor>(given, stack, is_tensor, to_tensor);
    case Kind::kInts: return take_list<int64_t>(given, stack, is_number, to_number);
    case Kind::kOptionalInts:
      return take_optionals<int64_t>(given, stack, is_number_or_dtype, to_number_or_dtype);
    case Kind::kBools: return take_list<bool>(given, stack, is_bool, to_bool);
    case Kind::kInt:
      if (!is_number_or_dtype(given)) return false;
      stack.emplace_back(to_number_or_dtype(given));
      return true;
    case Kind::kFloat:
      if (!PyFloat_CheckExact(given)) return false;
      stack.emplace_back(PyFloat_AS_DOUBLE(given));
      return true;
    case Kind::kBool:
      if (!is_bool(given)) return false;
      stack.emplace_back(to_bool(given));
      return true;
    case Kind::kText: {
      Py_ssize_t length = 0;
      const char* const text =
          PyUnicode_CheckExact(given) ? PyUnicode_AsUTF8AndSize(given, &length) : nullptr;
      if (text == nullptr) return false;
      stack.emplace_back(std::string(text, length));
      return true;
    }
    default: return false;
  }
}

constexpr size_t kMaxArguments = 64;

bool take_arguments(const std::vector<Argument>& arguments, PyObject* const* given,
                    size_t positional, PyObject* names, std::vector<c10::IValue>& stack) {
  PyObject* by_position[kMaxArguments] = {};
  if (positional > arguments.size()) return false;
  std::copy(given, given + positional, by_position);
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    size_t at = positional;  // one that was passed twice is not found
    while (at < arguments.size() && arguments[at].name != PyTuple_GET_ITEM(names, i)) ++at;
    if (at == arguments.size()) return false;
    by_position[at] = given[positional + i];
  }
  stack.reserve(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i)
    if (!take(arguments[i], by_position[i], stack)) return false;
  return PyErr_Occurred() == nullptr;
}

PyObject* to_python(const c10::IValue& value) {
  if (value.isTensor()) return THPVariable_Wrap(value.toTensor());
  if (value.isNone()) Py_RETURN_NONE;
  if (value.isInt()) return PyLong_FromLongLong(value.toInt());
  TORCH_CHECK(value.isTensorList(), "symm_cp: an op returned ", value.tagKind());
  const auto tensors = value.toTensorList();
  PyObject* const list = PyList_New(static_cast<Py_ssize_t>(tensors.size()));
  for (size_t i = 0; list != nullptr && i < tensors.size(); ++i)
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), THPVariable_Wrap(tensors.get(i)));
  return list;
}

PyObject* run(const c10::OperatorHandle& op, std::vector<c10::IValue>& stack) {
  HANDLE_TH_ERRORS {
    const pybind11::gil_scoped_release without_gil;
    op.callBoxed(stack);
  }
  if (stack.size() == 1) return to_python(stack[0]);
  if (stack.empty()) Py_RETURN_NONE;
  PyObject* const results = PyTuple_New(static_cast<Py_ssize_t>(stack.size()));
  for (size_t i = 0; results != nullptr && i < stack.size(); ++i)
    PyTuple_SET_ITEM(results, static_cast<Py_ssize_t>(i), to_python(stack[i]));
  return results;
  END_HANDLE_TH_ERRORS
}

PyObject* call(PyObject* object, PyObject* const* given, size_t count, PyObject* names) {
  const auto& self = *reinterpret_cast<OpCall*>(object);
  const bool modes =
      at::impl::torch_function_mode_enabled() || c10::impl::TorchDispatchModeTLS::any_modes_set();
  if (!modes) {
    std::vector<c10::IValue> stack;
    if (take_arguments(*self.arguments, given, PyVectorcall_NARGS(count), names, stack))
      return run(*self.op, stack);
    PyErr_Clear();  // of a number that is too large: torch says so
  }
  return PyObject_Vectorcall(self.torchs, given, count, names);
}

PyTypeObject* call_type() {
  static PyTypeObject type = [] {
    PyTypeObject made{PyVarObject_HEAD_INIT(nullptr, 0)};
    made.tp_name = "symm_cp.OpCall";
    made.tp_basicsize = sizeof(OpCall);
    made.tp_vectorcall_offset = offsetof(OpCall, vectorcall);
    made.tp_call = PyVectorcall_Call;
    made.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
    return made;
  }();
  return PyType_Ready(&type) == 0 ? &type : nullptr;
}

}  // namespace

// Returns a callable that does what `torchs`, torch's callable for the op, does; a new reference,
// or null with an exception set. It lives as long as the process.
extern "C" __attribute__((visibility("default"))) PyObject* symm_cp_op_call(const char* name,
                                                                            PyObject* torchs) {
  HANDLE_TH_ERRORS
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  auto arguments = std::make_unique<std::vector<Argument>>();
  for (const c10::Argument& argument : op.schema().arguments())
    arguments->push_back(describe(argument));
  TORCH_CHECK(arguments->size() <= kMaxArguments, name, " has too many arguments");
  PyTypeObject* const type = call_type();
  auto* const made = type == nullptr ? nullptr : PyObject_New(OpCall, type);
  if (made == nullptr) return nullptr;
  Py_INCREF(torchs);
  made->vectorcall = call;
  made->torchs = torchs;
  made->op = new c10::OperatorHandle(op);
  made->arguments = arguments.release();
  return reinterpret_cast<PyObject*>(made);
  END_HANDLE_TH_ERRORS
}
