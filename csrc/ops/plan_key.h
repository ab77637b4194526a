// The keys of calls of ops on streams: calls with the same key do the same work (stream_plans.h).
#pragma once

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace symm_cp::stream_plans {

using torch::jit::Stack;

// The tensors among the arguments of an op, and the bytes that distinguish its calls.
class Key {
 public:
  Key(const c10::OperatorHandle& op, const Stack& stack) {
    add(reinterpret_cast<intptr_t>(&op.schema()));
    const size_t count = op.schema().arguments().size();
    for (size_t i = 0; i < count && usable_; ++i) {
      if (op.schema().arguments()[i].name() == "group_name")
        group_ = torch::jit::peek(stack, i, count).toStringRef();
      add_value(torch::jit::peek(stack, i, count));
    }
    if (tensors_.empty() || group_.empty()) usable_ = false;
    if (usable_) add_settings();
  }

  bool usable() const { return usable_; }
  const std::string& bytes() const { return bytes_; }
  const std::string& group() const { return group_; }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  c10::Device device() const { return tensors_.front().device(); }

 private:
  void add(int64_t number) {
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }
  void add(std::string_view text) {
    add(static_cast<int64_t>(text.size()));
    bytes_.append(text);
  }

  void add_value(const c10::IValue& value) {
    if (value.isNone()) {
      bytes_.push_back('n');
    } else if (value.isTensor()) {
      add_tensor(value.toTensor());
    } else if (value.isInt()) {
      bytes_.push_back('i'), add(value.toInt());
    } else if (value.isBool()) {
      bytes_.push_back(value.toBool() ? 't' : 'f');
    } else if (value.isDouble()) {
      int64_t bits = 0;
      const double number = value.toDouble();
      std::memcpy(&bits, &number, sizeof(bits));
      bytes_.push_back('d'), add(bits);
    } else if (value.isString()) {
      bytes_.push_back('s'), add(value.toStringRef());
    } else if (value.isList()) {
      bytes_.push_back('l'), add(static_cast<int64_t>(value.toListRef().size()));
      for (const c10::IValue& element : value.toListRef()) add_value(element);
    } else {
      usable_ = false;
    }
  }

  void add_tensor(const at::Tensor& tensor) {
    bytes_.push_back('x');
    if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.has_storage() ||
        tensor.is_conj() || tensor.is_neg() || tensor._is_zerotensor() ||
        tensor.key_set().has(c10::DispatchKey::Python) || tensor.is_nested() ||
        // The host may read the values of integer tensors, such as layouts, masks and routings.
        c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
      usable_ = false;
      return;
    }
    const auto address = reinterpret_cast<intptr_t>(tensor.const_data_ptr());
    add(static_cast<int64_t>(tensor.scalar_type()));
    add(static_cast<int64_t>(tensor.device().type()) << 8 | tensor.device().index());
    add(tensor.dim());
    for (const int64_t size : tensor.sizes()) add(size);
    for (const int64_t stride : tensor.strides()) add(stride);
    add(address % 64);
    add(tensor.storage_offset() * static_cast<int64_t>(tensor.element_size()) % 64);
    add(tensor.storage().nbytes() > 0);
    // Tensors that share memory also need the same distance.
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (tensors_[i].storage().unsafeGetStorageImpl() != tensor.storage().unsafeGetStorageImpl())
        continue;
      bytes_.push_back('a'), add(static_cast<int64_t>(i));
      add(address - reinterpret_cast<intptr_t>(tensors_[i].const_data_ptr()));
      break;
    }
    tensors_.push_back(tensor);
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
    for (const char* name : {"SYMM_CP_WAY", "SYMM_CP_ATTENTION"}) {
      const char* value = std::getenv(name);
      add(std::string_view(value == nullptr ? "" : value));
    }
  }

  bool usable_ = true;
  std::string bytes_, group_;
  std::vector<at::Tensor> tensors_;
};

}  // namespace symm_cp::stream_plans
