// The keys of calls: calls with the same key do the same work (plan.h).
#pragma once

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace symm_cp {

namespace plans {

using torch::jit::Stack;

// The arguments of an op that may differ between calls of one plan: for each the dimension of a
// tensor, or of those in a list, whose size may, as do its strides and values, or kFreeNumber; none
// of an op without any.
using Free = std::vector<int>;
constexpr int kNotFree = -1;
constexpr int kFreeNumber = 100;

// The tensors among the arguments of an op, and the numbers that distinguish its calls.
class Key {
 public:
  using Numbers = c10::SmallVector<int64_t, 64>;
  using Tensors = c10::SmallVector<at::Tensor, 8>;

  // `host_values`: kernels may read the values of integer tensors on the host.
  Key(const c10::OperatorHandle& op, const Stack& stack, bool host_values, const Free& free)
      : host_values_(host_values) {
    numbers_.push_back(reinterpret_cast<intptr_t>(&op.schema()));
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size() && usable(); ++i) {
      const c10::IValue& value = torch::jit::peek(stack, i, arguments.size());
      const int how = free.empty() ? kNotFree : free[i];
      if (value.isString() && arguments[i].name() == "group_name")
        group_name_ = &value.toStringRef();
      else if (how == kFreeNumber && value.isInt())
        add(-4), free_numbers_.push_back({&arguments[i].name(), value.toInt()});
      else
        add_value(value, how);
    }
    if (usable() && (tensors_.empty() || group_name_ == nullptr)) unusable_ = "it takes no tensor";
    if (usable()) add_settings();
  }

  // Whether numbers tell all arguments apart.
  bool usable() const { return unusable_ == nullptr; }
  // Why not.
  const char* unusable() const { return unusable_; }
  const std::string& group_name() const { return *group_name_; }
  // A number of the group, which no other group gets: names come back.
  void set_group(int64_t number) { numbers_.push_back(number); }
  const Numbers& numbers() const { return numbers_; }
  const Tensors& tensors() const { return tensors_; }
  bool has_free() const { return free_tensors_ != 0 || !free_numbers_.empty(); }
  bool is_free(size_t tensor) const { return tensor < 64 && (free_tensors_ >> tensor & 1) != 0; }
  struct FreeNumber {
    const std::string* name;
    int64_t value;
  };
  using FreeNumbers = c10::SmallVector<FreeNumber, 2>;
  const FreeNumbers& free_numbers() const { return free_numbers_; }
  c10::Device device() const { return tensors_.front().device(); }

 private:
  // Integer tensors of up to this many elements on the host, such as the boundaries of documents,
  // are part of the key with their values, which kernels may read.
  static constexpr int64_t kMostValues = 256;

  void add(int64_t number) { numbers_.push_back(number); }
  void add(std::string_view text) {
    add(static_cast<int64_t>(text.size()));
    const size_t first = numbers_.size();
    numbers_.resize(first + (text.size() + 7) / 8, 0);
    std::memcpy(numbers_.data() + first, text.data(), text.size());
  }

  void add_value(const c10::IValue& value, int free_dim) {
    if (value.isNone()) {
      add(-1);
    } else if (value.isTensor()) {
      add_tensor(value.toTensor(), free_dim);
    } else if (value.isInt()) {
      add(value.toInt());
    } else if (value.isBool()) {
      add(value.toBool() ? 1 : 0);
    } else if (value.isDouble()) {
      int64_t bits = 0;
      const double number = value.toDouble();
      std::memcpy(&bits, &number, sizeof(bits));
      add(bits);
    } else if (value.isString()) {
      add(value.toStringRef());
    } else if (value.isList()) {
      add(-2 - static_cast<int64_t>(value.toListRef().size()));
      for (const c10::IValue& element : value.toListRef()) add_value(element, free_dim);
    } else {
      unusable_ = "an argument is of a kind that plans do not tell apart";
    }
  }

  // Of a free size the key holds which others it equals, and whether it is 0 or 1.
  void add_free_size(int64_t size) {
    const auto* known = std::find(free_sizes_.begin(), free_sizes_.end(), size);
    add((known - free_sizes_.begin()) << 2 | std::min<int64_t>(size, 2));
    if (known == free_sizes_.end()) free_sizes_.push_back(size);
  }

  void add_tensor(const at::Tensor& tensor, int free_dim) {
    const bool is_free = free_dim != kNotFree;
    if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.has_storage() ||
        tensor.is_conj() || tensor.is_neg() || tensor._is_zerotensor() ||
        tensor.key_set().has(c10::DispatchKey::Python) || tensor.is_nested()) {
      unusable_ = "a tensor has no plain memory";
      return;
    }
    const auto address = reinterpret_cast<intptr_t>(tensor.const_data_ptr());
    const auto size = static_cast<int64_t>(tensor.element_size());
    add(static_cast<int64_t>(tensor.scalar_type()) |
        static_cast<int64_t>(tensor.device().type()) << 8 |
        static_cast<int64_t>(static_cast<uint8_t>(tensor.device().index())) << 16 |
        tensor.dim() << 24 | int64_t{is_free || address % 64 == 0} << 32);
    int64_t last = tensor.storage_offset();
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      if (dim == free_dim)
        add_free_size(tensor.size(dim));
      else
        add(tensor.size(dim));
      if (!is_free) add(tensor.stride(dim));
      last += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
    // Freed or resized memory: Python raises the error.
    if (tensor.numel() > 0 &&
        (static_cast<int64_t>(tensor.storage().nbytes()) < (last + 1) * size || address == 0))
      unusable_ = "a tensor's memory was freed or resized";
    // Tensors that share memory also need the same distance.
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (tensors_[i].storage().unsafeGetStorageImpl() != tensor.storage().unsafeGetStorageImpl())
        continue;
      add(-3 - static_cast<int64_t>(i));
      add(address - reinterpret_cast<intptr_t>(tensors_[i].const_data_ptr()));
      // One tensor may be two free arguments, which are told apart by their strides only.
      for (int64_t dim = 0; is_free && dim < tensor.dim(); ++dim) add(tensor.stride(dim));
      for (int64_t dim = 0; is_free && dim < tensors_[i].dim(); ++dim) add(tensors_[i].stride(dim));
      break;
    }
    if (is_free && tensors_.size() >= 64) unusable_ = "it takes too many tensors";
    if (is_free) free_tensors_ |= uint64_t{1} << tensors_.size() % 64;
    tensors_.push_back(tensor);
    // The host may read the values of integer tensors, such as layouts, masks and routings.
    if (usable() && !is_free && c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true))
      add_values(tensor);
  }

  void add_values(const at::Tensor& tensor) {
    if (tensor.numel() == 0) return;
    if (!host_values_ || !tensor.is_cpu() || tensor.numel() > kMostValues ||
        !tensor.is_contiguous()) {
      unusable_ = "kernels may read the values of a long tensor of integers";
      return;
    }
    add(std::string_view(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()));
  }

  // Adds the global settings on which kernels, or the choice among them, depend.
  void add_settings() {
    const auto& context = at::globalContext();
    add(context.userEnabledFlashSDP() | context.userEnabledMemEfficientSDP() << 1 |
        context.userEnabledMathSDP() << 2 | context.userEnabledCuDNNSDP() << 3 |
        context.deterministicAlgorithms() << 4);
    const auto type = device().type();
    const bool cast =
        at::autocast::is_autocast_available(type) && at::autocast::is_autocast_enabled(type);
    add(cast ? static_cast<int64_t>(at::autocast::get_autocast_dtype(type)) : -1);
  }

  bool host_values_;
  const char* unusable_ = nullptr;
  Numbers numbers_;
  Tensors tensors_;
  uint64_t free_tensors_ = 0;
  c10::SmallVector<int64_t, 4> free_sizes_;
  FreeNumbers free_numbers_;
  const std::string* group_name_ = nullptr;
};

struct HashNumbers {
  size_t operator()(const Key::Numbers& numbers) const {
    uint64_t hash = numbers.size();
    for (const int64_t number : numbers) {
      hash = (hash ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

}  // namespace plans
}  // namespace symm_cp
