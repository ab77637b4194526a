// Typed errors of the native part; c_api.cpp and symmetric_memory.cpp translate them.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace symm_cp {

// The world failed: a peer died, aborted, disagreed or did not answer in time.
class PeerError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A system call failed; the message carries errno's text.
class SystemError : public std::runtime_error {
 public:
  explicit SystemError(const std::string& what)
      : std::runtime_error(what + ": " + std::strerror(errno)) {}
};

}  // namespace symm_cp
