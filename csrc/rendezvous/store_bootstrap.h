// Adapts a group's torch store to `Peers` and `Messages`.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/helper_thread.h"
#include "base/python.h"
#include "rendezvous/peers.h"

namespace symm_cp {

inline void write_text(c10d::Store& store, const std::string& key, const std::string& text) {
  try {
    store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
  } catch (const c10::Error& error) {  // an internal assertion of torch's
    if (error.msg().find("Not implemented") == std::string::npos) throw;
    throw std::runtime_error(
        "the group's store keeps nothing, as FakeStore of the backend \"fake\": its ranks share no "
        "memory");
  }
}

// Returns nullopt if the store does not have the key.
inline std::optional<std::string> read_text(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return std::nullopt;
  const auto text = store.get(key);
  return std::string(text.begin(), text.end());
}

// Clones a store for another thread; returns the store itself if it has no clone (in Python).
inline c10::intrusive_ptr<c10d::Store> copy_of(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;
  }
}

// A request to the store ends with an error when the store has not answered within `limit`: the
// process that hosts it, or that holds its lock (FileStore), may have been stopped. Every later
// request then fails at once.
class StoreBootstrap : public Bootstrap {
 public:
  // `lost`: see Bootstrap; by default no rank is known to have ended.
  StoreBootstrap(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds limit,
                 std::function<bool(int rank)> lost = {})
      : store_(std::move(store)), limit_(limit), lost_(std::move(lost)) {}
  void set(const std::string& key, const std::string& value) override {
    ask(key, [store = store_, key, value] {
      write_text(*store, key, value);
      return Value();
    });
  }
  std::optional<std::string> get(const std::string& key) override {
    return ask(key, [store = store_, key] { return read_text(*store, key); });
  }
  bool lost(int rank) override { return lost_ && lost_(rank); }

 private:
  using Value = std::optional<std::string>;

  Value ask(const std::string& key, std::function<Value()> request) {
    const WithoutGil without_gil;  // the store may be written in Python
    if (answers_) {
      answers_ = false;
      try {
        if (auto value = run_for<Value>(limit_, std::move(request), throw_if_interrupted)) {
          answers_ = true;
          return std::move(*value);
        }
      } catch (const Interrupted&) {
        throw;  // later requests must not wait for this store either
      } catch (...) {
        answers_ = true;  // with an error
        throw;
      }
    }
    throw PeerError("the group's store did not answer within " + std::to_string(limit_.count()) +
                    " ms (key '" + key +
                    "'): the process that hosts it, or holds its lock, may have been stopped");
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::chrono::milliseconds limit_;
  std::function<bool(int rank)> lost_;
  bool answers_ = true;
};

}  // namespace symm_cp
