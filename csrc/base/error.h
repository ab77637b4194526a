// Typed errors of the native part; c_api.cpp and symmetric_memory.cpp translate them.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace symm_cp {

// A peer died, failed, disagreed or did not answer in time. `cause` is the first error, on
// whichever rank; it is passed to the peers unchanged, so that every rank's error names the rank
// that caused it.
class PeerError : public std::runtime_error {
 public:
  explicit PeerError(const std::string& what) : std::runtime_error(what), cause_(what) {}
  PeerError(const std::string& what, std::string cause)
      : std::runtime_error(what), cause_(std::move(cause)) {}
  const std::string& cause() const { return cause_; }

 private:
  std::string cause_;
};

// A peer did not answer in time: the ranks may no longer agree on which call is next.
class TimedOut : public PeerError {
 public:
  using PeerError::PeerError;
};

// A signal handler raised a Python exception while this rank waited.
class Interrupted : public PeerError {
 public:
  using PeerError::PeerError;
};

// This process lacks memory, file descriptors or another resource.
class ResourceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A system call failed; the message carries errno's text.
class SystemError : public ResourceError {
 public:
  explicit SystemError(const std::string& what)
      : ResourceError(what + ": " + std::strerror(errno)) {}
};

// The text in which a rank's failure is reported to its peers.
inline std::string cause_of(const std::exception& error, int rank) {
  const auto* known = dynamic_cast<const PeerError*>(&error);
  if (known != nullptr && dynamic_cast<const Interrupted*>(&error) == nullptr)
    return known->cause();
  return std::string(error.what()) + " (on rank " + std::to_string(rank) + ")";
}

}  // namespace symm_cp
