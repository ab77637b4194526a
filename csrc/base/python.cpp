#include "base/python.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <utility>

#include "base/error.h"

extern "C" {
int Py_IsInitialized() __attribute__((weak));
int PyGILState_Ensure() __attribute__((weak));
void PyGILState_Release(int) __attribute__((weak));
int PyErr_CheckSignals() __attribute__((weak));
void PyErr_Fetch(void**, void**, void**) __attribute__((weak));
void PyErr_Restore(void*, void*, void*) __attribute__((weak));
void PyErr_NormalizeException(void**, void**, void**) __attribute__((weak));
void* PyObject_Str(void*) __attribute__((weak));
const char* PyUnicode_AsUTF8(void*) __attribute__((weak));
int Py_AddPendingCall(int (*)(void*), void*) __attribute__((weak));
void* PyImport_AddModule(const char*) __attribute__((weak));
void* PyObject_GetAttrString(void*, const char*) __attribute__((weak));
int PyObject_IsTrue(void*) __attribute__((weak));
void PyErr_Clear() __attribute__((weak));
void Py_IncRef(void*) __attribute__((weak));
void Py_DecRef(void*) __attribute__((weak));
}

namespace symm_cp {

namespace {

struct Raised {
  void *type, *value, *traceback;
};

// Runs in the main thread, with Python's lock, before the next instruction of Python code.
int raise_again(void* pending) {
  auto* raised = static_cast<Raised*>(pending);
  PyErr_Restore(raised->type, raised->value, raised->traceback);
  delete raised;
  return -1;
}

// Makes Python raise the exception soon. The caller holds Python's lock.
void raise_soon(Raised* raised) {
  if (Py_AddPendingCall(raise_again, raised) != 0) raise_again(raised);  // the queue is full
}

bool in_main_thread() { return static_cast<pid_t>(syscall(SYS_gettid)) == getpid(); }

thread_local bool interrupted_here = false;

std::atomic<int> forks{0};
const bool counting = pthread_atfork(nullptr, nullptr, [] { ++forks; }) == 0;

}  // namespace

int fork_count() { return forks; }

bool in_test_mode() {
  if (PyImport_AddModule == nullptr || !Py_IsInitialized()) return false;
  const int state = PyGILState_Ensure();
  static void* const module = PyImport_AddModule("torch.distributed._symmetric_memory");
  void* const mode = PyObject_GetAttrString(module, "_is_test_mode");
  const bool on = mode != nullptr && PyObject_IsTrue(mode) == 1;
  if (mode == nullptr) PyErr_Clear();
  Py_DecRef(mode);  // or null
  PyGILState_Release(state);
  return on;
}

void throw_if_interrupted() {
  if (PyErr_CheckSignals == nullptr || !Py_IsInitialized() || !in_main_thread()) return;
  const int state = PyGILState_Ensure();
  auto* raised = new Raised{};
  const bool interrupted = PyErr_CheckSignals() != 0;
  if (interrupted) {
    PyErr_Fetch(&raised->type, &raised->value, &raised->traceback);
    raise_soon(raised);
  } else {
    delete raised;
  }
  PyGILState_Release(state);
  if (!interrupted) return;
  interrupted_here = true;
  throw Interrupted("interrupted by a signal");
}

void raise_later(void* exception) {
  if (!in_main_thread()) return;
  const int state = PyGILState_Ensure();
  Py_IncRef(exception);
  raise_soon(new Raised{exception, nullptr, nullptr});
  PyGILState_Release(state);
}

std::string unreported_error() {
  if (PyErr_Fetch == nullptr || !Py_IsInitialized()) return {};
  const int state = PyGILState_Ensure();
  Raised raised{};
  PyErr_Fetch(&raised.type, &raised.value, &raised.traceback);
  PyErr_NormalizeException(&raised.type, &raised.value, &raised.traceback);
  std::string text;
  if (raised.value != nullptr) {
    void* const reported = PyObject_GetAttrString(raised.value, "_symm_cp_reported");
    void* const shown = reported == nullptr ? PyObject_Str(raised.value) : nullptr;
    const char* const utf8 = shown != nullptr ? PyUnicode_AsUTF8(shown) : nullptr;
    if (utf8 != nullptr) text = utf8;
    PyErr_Clear();  // the error of a failed look-up
    Py_DecRef(shown);
    Py_DecRef(reported);
  }
  PyErr_Restore(raised.type, raised.value, raised.traceback);
  PyGILState_Release(state);
  return text;
}

bool was_interrupted() { return std::exchange(interrupted_here, false); }

}  // namespace symm_cp
