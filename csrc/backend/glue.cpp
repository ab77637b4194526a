// Wraps a backend (csrc/backend/backend.h) in a torch object for Python. A separate library,
// because it needs Python's headers; built when a backend is first requested.
//
// Includes pybind11 itself, not torch's header for it: only that header's declaration of the holder
// is needed, and the header takes a quarter longer to compile.
#include <pybind11/pybind11.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>
#include <utility>

#include "base/glue.h"

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace {

// symm_cp_backend_open of csrc/backend/backend.cpp.
using Open = void* (*)(void* store, const char* name, int rank, int size, int64_t timeout_ms,
                       std::string* error);

pybind11::object open_backend(Open open, pybind11::handle store, const char* name, int rank,
                              int size, int64_t timeout_ms) {
  auto native_store = pybind11::cast<c10::intrusive_ptr<c10d::Store>>(store);
  std::string error;
  void* opened;
  {
    const pybind11::gil_scoped_release without_gil;
    opened = open(native_store.get(), name, rank, size, timeout_ms, &error);
  }
  if (opened == nullptr) throw std::runtime_error(error);
  return pybind11::cast(
      c10::intrusive_ptr<c10d::Backend>::reclaim(static_cast<c10d::Backend*>(opened)));
}

}  // namespace

// Returns a new reference; null with an exception set. The caller holds Python's lock.
SYMM_CP_EXPORT PyObject* symm_cp_backend_object(void* open, PyObject* store, const char* name,
                                                int rank, int size, int64_t timeout_ms) {
  try {
    return open_backend(reinterpret_cast<Open>(open), store, name, rank, size, timeout_ms)
        .release()
        .ptr();
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}
