// Records a call for Python (plan.h): symm_cp/cuda/plans.py calls these functions while it
// makes the call. Part of the library that needs Python's headers (backend/glue.cpp).
#include <ATen/ScalarOps.h>
#include <pybind11/pybind11.h>

#include <torch/csrc/Exceptions.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/glue.h"
#include "ops/python_arguments.h"
#include "plan/plan.h"

namespace {

using namespace symm_cp::python_arguments;
using symm_cp::plans::LaunchStep;
using symm_cp::plans::PythonStep;
using symm_cp::plans::Recording;

Recording& recording_of(void* handle) { return *static_cast<Recording*>(handle); }

// Returns a reference to a Python object that any thread may release.
std::shared_ptr<PyObject> owned(PyObject* object) {
  Py_INCREF(object);
  return {object, [](PyObject* kept) {
            if (Py_IsInitialized() == 0) return;
            const pybind11::gil_scoped_acquire gil;
            Py_DECREF(kept);
          }};
}

// Throws Python's exception.
pybind11::object called(PyObject* function, PyObject* argument) {
  PyObject* const result = PyObject_CallOneArg(function, argument);
  if (result == nullptr) throw python_error();
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

pybind11::object list_of(const std::vector<at::Tensor>& tensors) {
  pybind11::list list;
  for (const at::Tensor& tensor : tensors)
    list.append(pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor)));
  return list;
}

// Appends the tensors in an object, including those in lists and tuples.
void add_tensors(PyObject* object, std::vector<at::Tensor>& tensors) {
  if (THPVariable_Check(object)) {
    tensors.push_back(THPVariable_Unpack(object));
  } else if (PyList_Check(object) || PyTuple_Check(object)) {
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
    for (Py_ssize_t i = 0; i < count; ++i)
      add_tensors(PySequence_Fast_GET_ITEM(object, i), tensors);
  }
}

std::vector<at::Tensor> tensors_in(PyObject* object) {
  std::vector<at::Tensor> tensors;
  add_tensors(object, tensors);
  return tensors;
}

struct KnownOp {
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
};

const KnownOp& known_op(const std::string& name, const std::string& overload) {
  static auto* const known = new std::map<std::pair<std::string, std::string>, KnownOp>;
  const auto found = known->find({name, overload});
  if (found != known->end()) return found->second;
  KnownOp made{c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()), {}};
  for (const c10::Argument& argument : made.op.schema().arguments())
    made.arguments.push_back(describe(argument));
  return known->emplace(std::pair{name, overload}, std::move(made)).first->second;
}

// Puts the arguments of an op on a stack; returns false if the type of one is not handled here.
bool arguments_of(const KnownOp& op, PyObject* args, PyObject* kwargs,
                  std::vector<c10::IValue>& stack) {
  const auto positional = static_cast<size_t>(PyTuple_GET_SIZE(args));
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    const Argument& argument = op.arguments[i];
    PyObject* const given = i < positional ? PyTuple_GET_ITEM(args, static_cast<Py_ssize_t>(i))
                                           : PyDict_GetItem(kwargs, argument.name);
    if (argument.type->kind() == c10::TypeKind::TensorType && given != nullptr &&
        (PyFloat_CheckExact(given) || PyLong_CheckExact(given))) {  // as in `tensor * 2`
      const auto number = PyFloat_CheckExact(given)
                              ? at::Scalar(PyFloat_AS_DOUBLE(given))
                              : at::Scalar(static_cast<int64_t>(PyLong_AsLongLong(given)));
      stack.emplace_back(at::native::wrapped_scalar_tensor(number));  // no mode sees it
    } else if (!take(argument, given, stack)) {
      return false;
    }
  }
  return true;
}

}  // namespace

SYMM_CP_EXPORT PyObject* symm_cp_plan_launch(void* handle, void* streams, PyObject* memory,
                                             const symm_cp::WorkspaceLayout* layout, uint32_t epoch,
                                             void* const* lanes, const void* const* operands,
                                             int count, const char* call_name, PyObject* owner,
                                             PyObject* fail) {
  HANDLE_TH_ERRORS
  LaunchStep step{};
  step.streams = static_cast<symm_cp::Streams*>(streams);
  step.memory = THPVariable_Unpack(memory);
  step.layout = *layout;
  std::copy(lanes, lanes + symm_cp::kLanes, step.lanes);
  step.call_name = call_name;
  step.owner = owned(owner);
  step.fail = [fail = owned(fail)](const std::vector<at::Tensor>& used, const std::string& error) {
    const pybind11::gil_scoped_acquire gil;
    std::vector<at::Tensor> present;
    for (const at::Tensor& tensor : used)
      if (tensor.defined()) present.push_back(tensor);
    const auto arguments = pybind11::make_tuple(list_of(present), error);
    called(fail.get(), arguments.ptr());
  };
  recording_of(handle).launch(std::move(step), epoch,
                              std::vector<const void*>(operands, operands + count));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

SYMM_CP_EXPORT void symm_cp_plan_commands(void* handle, const symm_cp::Command* first, int count) {
  recording_of(handle).commands(first, count);
}

SYMM_CP_EXPORT int symm_cp_plan_kernel(void* handle, int lane) {
  return recording_of(handle).kernel(lane);
}
SYMM_CP_EXPORT void symm_cp_plan_end_launch(void* handle) { recording_of(handle).end_launch(); }
SYMM_CP_EXPORT void symm_cp_plan_constant(void* handle, PyObject* tensor) {
  recording_of(handle).constant(THPVariable_Unpack(tensor));
}
SYMM_CP_EXPORT void symm_cp_plan_counts(void* handle) { recording_of(handle).counts(); }
SYMM_CP_EXPORT void symm_cp_plan_refuse(void* handle, const char* reason) {
  recording_of(handle).refuse(reason);
}

// Makes a plan call `refuses()` before each run; the plan runs only if that returns false.
SYMM_CP_EXPORT void symm_cp_plan_ask(void* handle, PyObject* refuses) {
  recording_of(handle).ask([refuses = owned(refuses)] {
    const pybind11::gil_scoped_acquire gil;
    PyObject* const result = PyObject_CallNoArgs(refuses.get());
    if (result == nullptr) throw python_error();
    const bool no = PyObject_IsTrue(result) == 1;
    Py_DECREF(result);
    return !no;
  });
}

// Called before an op runs.
SYMM_CP_EXPORT void symm_cp_plan_before_op(void* handle) { recording_of(handle).before_op(); }

// Records an op that ran with these arguments.
SYMM_CP_EXPORT PyObject* symm_cp_plan_ran(void* handle, int kernel, const char* name,
                                          const char* overload, PyObject* args, PyObject* kwargs,
                                          PyObject* result) {
  HANDLE_TH_ERRORS
  const KnownOp& op = known_op(name, overload);
  std::vector<c10::IValue> stack;
  if (arguments_of(op, args, kwargs, stack))
    recording_of(handle).op(kernel, op.op, stack, tensors_in(result));
  else
    recording_of(handle).refuse(std::string("an argument of ") + name);
  PyErr_Clear();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Records a call of a Python function with a list of tensors.
SYMM_CP_EXPORT PyObject* symm_cp_plan_called(void* handle, int kernel, PyObject* function,
                                             PyObject* given, PyObject* result) {
  HANDLE_TH_ERRORS
  PythonStep step;
  step.function = [function = owned(function)](const std::vector<at::Tensor>& tensors) {
    const pybind11::gil_scoped_acquire gil;
    return tensors_in(called(function.get(), list_of(tensors).ptr()).ptr());
  };
  recording_of(handle).python(kernel, std::move(step), tensors_in(given), tensors_in(result));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}
