// What the sources here share.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <istream>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "rendezvous/peers.h"

namespace native_test {

inline void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "ranks: %s\n", what.c_str());
  std::abort();
}

inline std::string failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

inline void expect_failure(const std::function<void()>& body, const std::string& part) {
  const std::string message = failure_of(body);
  expect(message.find(part) != std::string::npos, "'" + part + "' is not in '" + message + "'");
}

// The store of a group.
class Notes : public symm_cp::Bootstrap {
 public:
  void set(const std::string& key, const std::string& value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
  }
  std::optional<std::string> get(const std::string& key) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = values_.find(key);
    return it == values_.end() ? std::nullopt : std::optional(it->second);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
};

// Reads from a file that loops.py has written.
template <class T>
void read(std::istream& file, T* to, size_t count = 1) {
  file.read(reinterpret_cast<char*>(to), static_cast<std::streamsize>(count * sizeof(T)));
  expect(file.good(), "the file is too short");
}

// send_receive.cpp
void check_messages(unsigned seed);

// exchanges.cpp. `file` holds the loops of a number of ranks; `skip` is a flag that they do not
// wait for, or -1.
void check_exchanges(const char* file, unsigned seed, int skip);

}  // namespace native_test
