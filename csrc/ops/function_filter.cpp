// Lets a torch function mode pass most functions without a call of Python. Part of the library that
// needs Python's headers (backend/glue.cpp).
#include <Python.h>

#include <cstddef>

#include "base/glue.h"

namespace {

// Stands for a mode's `__torch_function__`; subclasses define `__call__` in Python.
struct Filter {
  PyObject_HEAD vectorcallfunc vectorcall;
};

PyObject* seen_in_python;      // a dict whose keys are the functions that `__call__` handles
PyTypeObject* method_wrapper;  // the type of `x.__len__`, which Python's headers do not name

// Whether a function is of a kind that Python would only call. -1 with an exception set on failure.
// Other kinds of callables (ops, which `__call__` knows by name) are left to Python.
int passes(PyObject* function) {
  const PyTypeObject* const type = Py_TYPE(function);
  if (type != &PyCFunction_Type && type != &PyMethodDescr_Type && type != &PyWrapperDescr_Type &&
      type != &PyFunction_Type && type != method_wrapper)
    return 0;
  const int handled = PyDict_Contains(seen_in_python, function);
  return handled < 0 ? -1 : handled == 0;
}

// Gets (function, types, arguments), and maybe keyword arguments, as torch calls a mode.
PyObject* call_filter(PyObject* self, PyObject* const* given, size_t count, PyObject* names) {
  const Py_ssize_t number = PyVectorcall_NARGS(count);
  const bool usual = names == nullptr && (number == 3 || number == 4) && PyTuple_Check(given[2]);
  PyObject* const options = number == 4 && given[3] != Py_None ? given[3] : nullptr;
  if (usual && (options == nullptr || PyDict_Check(options))) {
    const int passed = passes(given[0]);
    if (passed < 0) return nullptr;
    if (passed == 1) return PyObject_Call(given[0], given[2], options);
  }
  PyObject* const in_python = PyObject_GetAttrString(self, "__call__");
  if (in_python == nullptr) return nullptr;
  PyObject* const result = PyObject_Vectorcall(in_python, given, count, names);
  Py_DECREF(in_python);
  return result;
}

PyObject* new_filter(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* const made = type->tp_alloc(type, 0);
  if (made != nullptr) reinterpret_cast<Filter*>(made)->vectorcall = call_filter;
  return made;
}

// Python leaves this flag out in a subclass that defines `__call__`.
PyObject* init_filter_class(PyObject* type, PyObject*) {
  reinterpret_cast<PyTypeObject*>(type)->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
  Py_RETURN_NONE;
}

PyMethodDef kFilterMethods[] = {
    {"__init_subclass__", init_filter_class, METH_NOARGS | METH_CLASS, nullptr}, {}};

PyTypeObject* filter_type() {
  static PyTypeObject type = [] {
    PyTypeObject made{PyVarObject_HEAD_INIT(nullptr, 0)};
    made.tp_name = "symm_cp.FunctionFilter";
    made.tp_basicsize = sizeof(Filter);
    made.tp_new = new_filter;
    made.tp_methods = kFilterMethods;
    made.tp_vectorcall_offset = offsetof(Filter, vectorcall);
    made.tp_call = PyVectorcall_Call;
    made.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_VECTORCALL;
    return made;
  }();
  return PyType_Ready(&type) == 0 ? &type : nullptr;
}

}  // namespace

// Returns a new reference to the base class of filters, which call Python for the functions that
// are keys of `functions`, a dict.
SYMM_CP_EXPORT PyObject* symm_cp_function_filter(PyObject* functions) {
  PyTypeObject* const type = filter_type();
  if (type == nullptr) return nullptr;
  PyObject* const wrapper = PyObject_GetAttrString(functions, "__len__");
  if (wrapper == nullptr) return nullptr;
  method_wrapper = Py_TYPE(wrapper);
  Py_DECREF(wrapper);
  Py_INCREF(functions);
  Py_XSETREF(seen_in_python, functions);
  return Py_NewRef(type);
}
