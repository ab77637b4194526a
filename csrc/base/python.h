// Waiting in a Python process: releases the GIL for other threads, and handles Ctrl-C.
//
// torch calls a handle's barrier, put_signal, wait_signal and rendezvous with Python's lock held:
// on CUDA they only enqueue. Here they block, so with the lock held two threads that wait in two
// groups would deadlock with a rank whose threads wait in the other order.
#pragma once

#include <string>

// Found in the running interpreter, so that no Python headers are needed; null without one.
extern "C" {
int PyGILState_Check() __attribute__((weak));
void* PyEval_SaveThread() __attribute__((weak));
void PyEval_RestoreThread(void*) __attribute__((weak));
}

namespace symm_cp {

class WithoutGil {
 public:
  WithoutGil() {
    if (PyGILState_Check != nullptr && PyGILState_Check() == 1) state_ = PyEval_SaveThread();
  }
  // If the interpreter is shutting down, taking the lock ends the thread by unwinding its stack.
  ~WithoutGil() noexcept(false) {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* state_ = nullptr;
};

// Runs the handlers of signals that have arrived, in the main thread (elsewhere it does nothing).
// Throws `Interrupted` when a handler raised, as Ctrl-C's does; Python raises its exception
// as soon as it runs again. Call it without Python's lock.
void throw_if_interrupted();

// Lets Python raise an exception of this type as soon as it runs again, in the main thread
// (elsewhere it does nothing).
void raise_later(void* exception);

// Whether torch's `_symmetric_memory._test_mode()` is on, in which ops run their unfused
// definitions.
bool in_test_mode();

// Whether `throw_if_interrupted` has thrown in this thread since the last call of this function.
bool was_interrupted();

// Returns the text of the Python exception that is passing through C++; empty if there is none, or
// if it is marked as already reported to the peers (symm_cp/group/memory.py).
std::string unreported_error();

// Counts how often this process was forked from one that had loaded this library.
int fork_count();

}  // namespace symm_cp
