// A group's store of torch, as `Peers` and `Messages` see it.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "peers.h"

namespace symm_cp {

class StoreBootstrap : public Bootstrap {
 public:
  // `lost`: see Bootstrap; by default no rank is known to have ended.
  explicit StoreBootstrap(c10::intrusive_ptr<c10d::Store> store,
                          std::function<bool(int rank)> lost = {})
      : store_(std::move(store)), lost_(std::move(lost)) {}
  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  std::optional<std::string> get(const std::string& key) override {
    if (!store_->check({key})) return std::nullopt;
    const auto value = store_->get(key);
    return std::string(value.begin(), value.end());
  }
  bool lost(int rank) override { return lost_ && lost_(rank); }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  std::function<bool(int rank)> lost_;
};

}  // namespace symm_cp
