// Puts an op's arguments, which are Python objects, on its stack by position, without a search
// among overloads. Torch converts them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Export.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <vector>

namespace torch::jit {

// As in torch/csrc/jit/python/pybind_utils.h, which takes long to compile.
TORCH_PYTHON_API c10::IValue toIValue(pybind11::handle object, const c10::TypePtr& type,
                                      std::optional<int32_t> length);
TORCH_PYTHON_API pybind11::object toPyObject(c10::IValue value);

}  // namespace torch::jit

namespace symm_cp::python_arguments {

struct Argument {
  PyObject* name;
  c10::TypePtr type;
  std::optional<int32_t> length;  // of a list that one number fills
  std::optional<c10::IValue> given_by_default;
};

inline Argument describe(const c10::Argument& argument) {
  return {PyUnicode_InternFromString(argument.name().c_str()), argument.real_type(), argument.N(),
          argument.default_value()};
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
  return PyErr_Occurred() == nullptr;
}

}  // namespace symm_cp::python_arguments
