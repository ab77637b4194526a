// Puts an op's arguments, which are Python objects, on its stack by position, without a search
// among overloads. Leaves types other than the usual ones to the caller.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace symm_cp::python_arguments {

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
  kTexts,
  kNumber,
  kDevice,
  kOther
};

struct Argument {
  PyObject* name;
  Kind kind;
  bool optional;
  std::optional<c10::IValue> given_by_default;
};

inline Kind kind_of_list(const c10::ListType& type) {
  const c10::TypePtr& element = type.getElementType();
  switch (element->kind()) {
    case c10::TypeKind::TensorType: return Kind::kTensors;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: return Kind::kInts;
    case c10::TypeKind::BoolType: return Kind::kBools;
    case c10::TypeKind::StringType: return Kind::kTexts;
    case c10::TypeKind::OptionalType: {
      const auto inner = element->expectRef<c10::OptionalType>().getElementType()->kind();
      if (inner == c10::TypeKind::TensorType) return Kind::kOptionalTensors;
      return inner == c10::TypeKind::IntType ? Kind::kOptionalInts : Kind::kOther;
    }
    default: return Kind::kOther;
  }
}

inline Kind kind_of(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return Kind::kTensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: return Kind::kInt;
    case c10::TypeKind::NumberType: return Kind::kNumber;
    case c10::TypeKind::DeviceObjType: return Kind::kDevice;
    case c10::TypeKind::FloatType: return Kind::kFloat;
    case c10::TypeKind::BoolType: return Kind::kBool;
    case c10::TypeKind::StringType: return Kind::kText;
    case c10::TypeKind::ListType: return kind_of_list(type->expectRef<c10::ListType>());
    default: return Kind::kOther;
  }
}

inline Argument describe(const c10::Argument& argument) {
  const c10::TypePtr& type = argument.type();
  const bool optional = type->kind() == c10::TypeKind::OptionalType;
  const c10::TypePtr& inner =
      optional ? type->expectRef<c10::OptionalType>().getElementType() : type;
  return {PyUnicode_InternFromString(argument.name().c_str()), kind_of(inner), optional,
          argument.default_value()};
}

inline bool is_tensor(PyObject* given) { return THPVariable_CheckExact(given); }
inline const at::Tensor& to_tensor(PyObject* given) { return THPVariable_Unpack(given); }
inline bool is_number(PyObject* given) { return PyLong_CheckExact(given); }
// Sets a Python exception if the number is too large.
inline int64_t to_number(PyObject* given) { return PyLong_AsLongLong(given); }

// Whether an object is a number, or an enum of torch's: a dtype, a layout, a memory format.
inline bool is_number_or_enum(PyObject* given) {
  return is_number(given) || THPDtype_Check(given) || THPLayout_Check(given) ||
         THPMemoryFormat_Check(given);
}
inline int64_t to_number_or_enum(PyObject* given) {
  if (THPDtype_Check(given))
    return static_cast<int64_t>(reinterpret_cast<THPDtype*>(given)->scalar_type);
  if (THPLayout_Check(given))
    return static_cast<int64_t>(reinterpret_cast<THPLayout*>(given)->layout);
  if (THPMemoryFormat_Check(given))
    return static_cast<int64_t>(reinterpret_cast<THPMemoryFormat*>(given)->memory_format);
  return to_number(given);
}
inline bool is_flag(PyObject* given) { return PyBool_Check(given); }
inline bool to_flag(PyObject* given) { return given == Py_True; }

// Sets a Python exception if the text contains a surrogate.
inline bool is_text(PyObject* given) {
  return PyUnicode_CheckExact(given) && PyUnicode_AsUTF8(given) != nullptr;
}
inline std::string to_text(PyObject* given) {
  Py_ssize_t length = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(given, &length);
  return std::string(text, length);
}

// Appends a list or a tuple to the stack; returns false if an element has another type.
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

// The same for a list whose elements may be None.
template <class Element, class Is, class To>
bool take_optionals(PyObject* given, std::vector<c10::IValue>& stack, Is is, To to) {
  using Optional = std::optional<Element>;
  return take_list<Optional>(
      given, stack, [&](PyObject* item) { return item == Py_None || is(item); },
      [&](PyObject* item) { return item == Py_None ? Optional() : Optional(to(item)); });
}

// Appends an argument to the stack; returns false if torch's callable must handle it.
inline bool take(const Argument& argument, PyObject* given, std::vector<c10::IValue>& stack) {
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
    case Kind::kDevice:
      if (!THPDevice_Check(given)) return false;
      stack.emplace_back(reinterpret_cast<THPDevice*>(given)->device);
      return true;
    case Kind::kBools: return take_list<bool>(given, stack, is_flag, to_flag);
    case Kind::kNumber:
      if (PyFloat_CheckExact(given)) {
        stack.emplace_back(PyFloat_AS_DOUBLE(given));
        return true;
      }
      if (is_flag(given)) {
        stack.emplace_back(to_flag(given));
        return true;
      }
      if (!is_number(given)) return false;
      stack.emplace_back(to_number(given));
      return true;
    case Kind::kTensors: return take_list<at::Tensor>(given, stack, is_tensor, to_tensor);
    case Kind::kInts: return take_list<int64_t>(given, stack, is_number, to_number);
    case Kind::kOptionalTensors:
      return take_optionals<at::Tensor>(given, stack, is_tensor, to_tensor);
    case Kind::kOptionalInts:
      return take_optionals<int64_t>(given, stack, is_number_or_enum, to_number_or_enum);
    case Kind::kInt:
      if (!is_number_or_enum(given)) return false;
      stack.emplace_back(to_number_or_enum(given));
      return true;
    case Kind::kFloat:
      if (!PyFloat_CheckExact(given)) return false;
      stack.emplace_back(PyFloat_AS_DOUBLE(given));
      return true;
    case Kind::kBool:
      if (!is_flag(given)) return false;
      stack.emplace_back(to_flag(given));
      return true;
    case Kind::kText:
      if (!is_text(given)) return false;
      stack.emplace_back(to_text(given));
      return true;
    case Kind::kTexts: return take_list<std::string>(given, stack, is_text, to_text);
    default: return false;
  }
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
  return PyErr_Occurred() == nullptr;
}

}  // namespace symm_cp::python_arguments
