// Puts an op's arguments, which are Python objects, on its stack by position, without a search
// among overloads. Torch converts those of rarer types: it takes up to 0.8 us for the others.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Export.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch::jit {

// As in torch/csrc/jit/python/pybind_utils.h, which takes long to compile.
TORCH_PYTHON_API c10::IValue toIValue(pybind11::handle object, const c10::TypePtr& type,
                                      std::optional<int32_t> length);
TORCH_PYTHON_API pybind11::object toPyObject(c10::IValue value);

}  // namespace torch::jit

namespace symm_cp::python_arguments {

enum class Kind {
  kTensor,
  kTensors,
  kOptionalTensors,
  kNumbers,
  kOptionalDtypes,
  kFlags,
  kText,
  kOther
};

struct Argument {
  PyObject* name;
  c10::TypePtr type;
  Kind kind;
  std::optional<int32_t> length;  // of a list that one number fills
  std::optional<c10::IValue> given_by_default;
};

inline Kind kind_of_list(const c10::TypePtr& element) {
  switch (element->kind()) {
    case c10::TypeKind::TensorType: return Kind::kTensors;
    case c10::TypeKind::BoolType: return Kind::kFlags;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: return Kind::kNumbers;
    case c10::TypeKind::OptionalType: {
      const auto inner = element->expectRef<c10::OptionalType>().getElementType()->kind();
      if (inner == c10::TypeKind::TensorType) return Kind::kOptionalTensors;
      return inner == c10::TypeKind::ScalarTypeType ? Kind::kOptionalDtypes : Kind::kOther;
    }
    default: return Kind::kOther;
  }
}

inline Kind kind_of(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return Kind::kTensor;
    case c10::TypeKind::StringType: return Kind::kText;
    case c10::TypeKind::OptionalType:
      return kind_of(type->expectRef<c10::OptionalType>().getElementType());
    case c10::TypeKind::ListType:
      return kind_of_list(type->expectRef<c10::ListType>().getElementType());
    default: return Kind::kOther;
  }
}

inline Argument describe(const c10::Argument& argument) {
  return {PyUnicode_InternFromString(argument.name().c_str()), argument.real_type(),
          kind_of(argument.real_type()), argument.N(), argument.default_value()};
}

// Appends a list whose elements are of the usual type; returns false if one is not.
template <class Element, class Is, class To>
bool take_list(PyObject* given, std::vector<c10::IValue>& stack, Is is, To to) {
  if (!PyList_Check(given) && !PyTuple_Check(given)) return false;
  PyObject** const items = PySequence_Fast_ITEMS(given);
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(given);
  if (!std::all_of(items, items + count, is)) return false;
  c10::List<Element> elements;
  elements.reserve(count);
  for (Py_ssize_t i = 0; i < count; ++i) elements.push_back(to(items[i]));
  stack.emplace_back(std::move(elements));
  return true;
}

// The same for a list whose elements may be None.
template <class Element, class Is, class To>
bool take_optionals(PyObject* given, std::vector<c10::IValue>& stack, Is is, To to) {
  using Optional = std::optional<Element>;
  return take_list<Optional>(
      given, stack, [&](PyObject* item) { return item == Py_None || is(item); },
      [&](PyObject* item) { return item == Py_None ? Optional() : Optional(to(item)); });
}

// Appends an argument of a usual type; returns false if it is of another.
inline bool take_usual(Kind kind, PyObject* given, std::vector<c10::IValue>& stack) {
  const auto is_tensor = [](PyObject* item) { return THPVariable_CheckExact(item); };
  const auto to_tensor = [](PyObject* item) { return THPVariable_Unpack(item); };
  const auto is_number = [](PyObject* item) { return PyLong_CheckExact(item); };
  switch (kind) {
    case Kind::kTensor:
      if (is_tensor(given)) stack.emplace_back(THPVariable_Unpack(given));
      return is_tensor(given);
    case Kind::kText: {
      Py_ssize_t length = 0;
      const char* const text =
          PyUnicode_CheckExact(given) ? PyUnicode_AsUTF8AndSize(given, &length) : nullptr;
      if (text != nullptr) stack.emplace_back(std::string(text, length));
      return text != nullptr;
    }
    case Kind::kTensors: return take_list<at::Tensor>(given, stack, is_tensor, to_tensor);
    case Kind::kOptionalTensors:
      return take_optionals<at::Tensor>(given, stack, is_tensor, to_tensor);
    case Kind::kOptionalDtypes:
      return take_optionals<int64_t>(
          given, stack, [](PyObject* item) { return THPDtype_Check(item); },
          [](PyObject* item) {
            return static_cast<int64_t>(reinterpret_cast<THPDtype*>(item)->scalar_type);
          });
    case Kind::kFlags:
      return take_list<bool>(
          given, stack, [](PyObject* item) { return PyBool_Check(item); },
          [](PyObject* item) { return item == Py_True; });
    case Kind::kNumbers: return take_list<int64_t>(given, stack, is_number, PyLong_AsLongLong);
    default: return false;
  }
}

// Whether an object is no tensor of a subclass, nor has one in it: torch asks the subclass first.
inline bool is_plain(PyObject* given) {
  if (THPVariable_Check(given)) return THPVariable_CheckExact(given);
  if (!PyList_Check(given) && !PyTuple_Check(given)) return true;
  PyObject** const items = PySequence_Fast_ITEMS(given);
  return std::all_of(items, items + PySequence_Fast_GET_SIZE(given), is_plain);
}

// Appends an argument to the stack; returns false if torch's callable must handle it.
inline bool take(const Argument& argument, PyObject* given, std::vector<c10::IValue>& stack) {
  if (given == nullptr) {
    if (argument.given_by_default) stack.push_back(*argument.given_by_default);
    return argument.given_by_default.has_value();
  }
  const bool usual = take_usual(argument.kind, given, stack);
  if (PyErr_Occurred() != nullptr) return false;  // a text with a surrogate, a number too large
  if (usual) return true;
  if (!is_plain(given)) return false;
  try {
    stack.push_back(torch::jit::toIValue(given, argument.type, argument.length));
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

inline constexpr size_t kMaxArguments = 64;

// Returns the position of the argument with that name, from `begin` on, or the number of arguments.
// A name from the caller's source is the same object; a name made at run time is compared by its
// characters.
inline size_t index_of(const std::vector<Argument>& arguments, size_t begin, PyObject* name) {
  for (size_t at = begin; at < arguments.size(); ++at)
    if (arguments[at].name == name) return at;
  for (size_t at = begin; at < arguments.size(); ++at)
    if (PyUnicode_Compare(arguments[at].name, name) == 0) return at;
  return arguments.size();  // also if the argument was already passed by position
}

inline bool take_arguments(const std::vector<Argument>& arguments, PyObject* const* given,
                           size_t positional, PyObject* names, std::vector<c10::IValue>& stack) {
  PyObject* by_position[kMaxArguments] = {};
  if (positional > arguments.size()) return false;
  std::copy(given, given + positional, by_position);
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    const size_t at = index_of(arguments, positional, PyTuple_GET_ITEM(names, i));
    if (at == arguments.size()) return false;
    by_position[at] = given[positional + i];
  }
  stack.reserve(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i)
    if (!take(arguments[i], by_position[i], stack)) return false;
  return true;
}

}  // namespace symm_cp::python_arguments
