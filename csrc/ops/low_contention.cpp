// The low-contention collectives: they return at once, and the copy engine moves the bytes. Their
// gradients are in gradients.cpp.
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

#include "base/profiler_event.h"
#include "base/python.h"
#include "ops/kernels.h"
#include "ops/low_contention.h"

namespace symm_cp {

namespace {

using namespace kernels;
using torch::jit::Stack;

constexpr const char* kGather = "_low_contention_all_gather";
constexpr const char* kScatter = "_low_contention_reduce_scatter";
constexpr const char* kGatherOut = "_low_contention_all_gather_out";
constexpr const char* kScatterOut = "_low_contention_reduce_scatter_out";

// Up to this many bytes, waking the engine costs more than the transfer. Such a transfer starts at
// `wait_tensor`, or with the next transfer that wakes the engine. It is never in place: peers would
// wait until this rank has read their input, which may be much later.
constexpr int64_t kWakeBytes = int64_t{64} << 10;

// Holds the transfer's input until it is waited for, and the output's storage. It does not hold the
// output tensor, since the work is registered under that tensor. torch keeps the work until then,
// even if nobody can wait any more: see `release_dropped_results`.
class Transfer : public c10d::Work {
 public:
  Transfer(std::shared_ptr<Group> group, int64_t number, std::shared_ptr<ProfilerEvent> event,
           at::Tensor input, c10::Storage output)
      : group_(std::move(group)),
        number_(number),
        event_(std::move(event)),
        input_(std::move(input)),
        output_(std::move(output)) {}

  bool isCompleted() override { return group_->lane().finished(number_); }

  // Whether nobody has the result, and its transfer has ended; makes it run if it has not begun.
  bool is_dropped() {
    if (output_.use_count() > 1) return false;
    if (!isCompleted()) group_->lane().wake();
    return isCompleted();
  }

  bool wait(std::chrono::milliseconds /*timeout*/) override {
    was_interrupted();  // in an earlier call
    try {
      group_->lane().wait(number_);
    } catch (const std::exception& error) {
      if (was_interrupted()) return abandoned();
      TORCH_CHECK(false, error.what());
    }
    if (event_) event_->end();
    input_.reset();
    return true;
  }

  // Keeps the memory until the transfer has ended. Python raises the exception of the signal's
  // handler when `wait` has returned.
  bool abandoned();

  // Weak references, which `Transfers` has, keep the object, but not what it holds.
  void release_resources() override {
    group_.reset();
    event_.reset();
    input_.reset();
    output_ = {};
  }

 private:
  std::shared_ptr<Group> group_;
  int64_t number_;
  std::shared_ptr<ProfilerEvent> event_;  // null unless a profiler is active
  at::Tensor input_;
  c10::Storage output_;
};

// The transfers that were started, and may not have been waited for yet.
class Transfers {
 public:
  // Never destroyed: results may be dropped while the process ends.
  static Transfers& instance() {
    static Transfers& transfers = *new Transfers;
    return transfers;
  }

  void add(const c10::intrusive_ptr<Transfer>& transfer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    started_.emplace_back(transfer);
  }

  // Keeps a transfer that nobody waits for any more until it has ended.
  void keep(c10::intrusive_ptr<Transfer> transfer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_.push_back(std::move(transfer));
  }

  // Has torch forget the transfers whose results were dropped.
  void release() {
    std::vector<c10::intrusive_ptr<Transfer>> alive, ended;  // destroyed without the lock
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto running = std::partition(
          kept_.begin(), kept_.end(), [](const auto& transfer) { return transfer->isCompleted(); });
      std::move(kept_.begin(), running, std::back_inserter(ended));
      kept_.erase(kept_.begin(), running);
      std::erase_if(started_, [&](const auto& weak) {
        auto transfer = weak.lock();
        if (!transfer) return true;
        alive.push_back(std::move(transfer));
        return false;
      });
    }
    for (const auto& transfer : alive)
      if (transfer->is_dropped()) c10d::unregister_work(transfer);
  }

 private:
  std::mutex mutex_;
  std::vector<c10::weak_intrusive_ptr<Transfer>> started_;
  std::vector<c10::intrusive_ptr<Transfer>> kept_;
};

bool Transfer::abandoned() {
  Transfers::instance().keep(c10::intrusive_ptr<Transfer>::unsafe_reclaim_from_nonowning(this));
  return false;
}

int64_t row_bytes(const at::Tensor& tensor) {
  int64_t bytes = static_cast<int64_t>(tensor.element_size());
  for (int64_t dim = 1; dim < tensor.dim(); ++dim) bytes *= tensor.size(dim);
  return bytes;
}

std::vector<int64_t> with_length(const at::Tensor& tensor, int64_t length) {
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape[0] = length;
  return shape;
}

// Sets a piece size that holds the whole input, so that the caller may overwrite the input early.
void set_piece(CheckedCall& call, int64_t bytes) {
  call.exchange.piece_bytes = bytes <= kPieceBytes ? kPieceBytes : std::max(2 * kPieceBytes, bytes);
}

void prepare_gather(CheckedCall& call, const at::Tensor& shard, const Sizes& given,
                    const Group& group) {
  check_has_dims(kGather, "tensor", shard);
  const std::vector<int64_t> sizes = check_gather(kGather, "dim", 0, shard, given, group);
  const int64_t row = row_bytes(shard), length = total(sizes);
  const int64_t largest = *std::max_element(sizes.begin(), sizes.end()) * row;
  const std::string uneven = name_sizes(sizes);
  call.output_shape = with_length(shard, length);
  call.exchange.kind = ExchangeKind::kAllGather;
  call.exchange.call_name =
      name_call(kGather, shard.scalar_type(),
                uneven.empty() ? shard.sizes() : at::IntArrayRef(call.output_shape), uneven);
  call.add_input(0, sizes[group.rank()] * row);
  int64_t at = 0;
  for (const int64_t size : sizes) {
    call.add_output(at * row, size * row);
    at += size;
  }
  set_piece(call, whole_parts(largest));
  call.background = largest > kWakeBytes;
  // An empty tensor has no address: ranks could not agree on whether their tensors are symmetric.
  call.in_place_possible = call.background && *std::min_element(sizes.begin(), sizes.end()) > 0;
}

void prepare_scatter(CheckedCall& call, const at::Tensor& whole, const std::string& reduce_by,
                     ReduceOp reduce_op, const Sizes& given, const Group& group) {
  check_has_dims(kScatter, "tensor", whole);
  const std::vector<int64_t> sizes = check_scatter(kScatter, whole, given, group.world_size());
  const int64_t row = row_bytes(whole);
  const int64_t largest = *std::max_element(sizes.begin(), sizes.end()) * row;
  call.output_shape = with_length(whole, sizes[group.rank()]);
  const std::string uneven = name_sizes(sizes);
  call.exchange.kind = ExchangeKind::kReduceScatter;
  call.exchange.call_name = name_call(kScatter, whole.scalar_type(), whole.sizes(),
                                      reduce_by + (uneven.empty() ? "" : " ") + uneven);
  set_reduction(call.exchange, whole.scalar_type(), reduce_op);
  int64_t at = 0;
  for (const int64_t size : sizes) {
    call.add_input(at * row, size * row);
    at += size;
  }
  call.add_output(0, sizes[group.rank()] * row);
  set_piece(call, whole_parts(largest) * group.world_size());
  call.background = static_cast<int64_t>(whole.nbytes()) > kWakeBytes;
  call.in_place_possible = call.background;
}

// Whether rows adjoin, judged by the stride even if there is only one row. is_contiguous would not
// do for parts of wider tensors: it holds for a part with one row, which only some ranks may have.
bool rows_adjoin(const at::Tensor& tensor) {
  return tensor.stride(0) * static_cast<int64_t>(tensor.element_size()) == row_bytes(tensor);
}

// The caller may overwrite a plain input after this returns. Writes to `output`, or to a new tensor
// if that is undefined, and returns it.
at::Tensor start_transfer(const char* op, const std::shared_ptr<Group>& group, CheckedCall& call,
                          const at::Tensor& given, at::Tensor output = {}) {
  release_dropped_results();
  at::Tensor input = given.contiguous();
  if (!output.defined()) output = new_output(given, call.output_shape);
  const bool in_place = call.in_place_possible && input.is_same(given) && rows_adjoin(given) &&
                        is_symmetric(*group, input);
  call.exchange.in_place = in_place;
  const CallLock lock(*group, kAsync);
  if (!in_place && input.is_same(given) && !starts_at_once(*group, call.exchange))
    input = given.clone();
  call.bind(input.const_data_ptr(), output.mutable_data_ptr());
  const std::shared_ptr<ProfilerEvent> event = ProfilerEvent::begin(op, given);
  const Started started = start(*group, call.exchange, call.background);
  const auto transfer =
      c10::make_intrusive<Transfer>(group, started.number, event, input, output.storage());
  c10d::register_work(output, transfer);
  Transfers::instance().add(transfer);
  return output;
}

CallKey key_of(const char* op, const Group& group, const at::Tensor& tensor, int64_t reduce_op,
               const Sizes& sizes) {
  CallKey key{reinterpret_cast<intptr_t>(op),
              group.world_size(),
              group.rank(),
              reduce_op,
              sizes.has_value(),
              tensor.dim()};
  add_tensor(key, tensor);
  if (sizes) key.append(sizes->begin(), sizes->end());
  return key;
}

std::shared_ptr<CheckedCall> gather_call(const Group& group, const at::Tensor& shard,
                                         const Sizes& sizes) {
  return CheckedCalls::of_this_thread().take(
      key_of(kGather, group, shard, 0, sizes),
      [&](CheckedCall& call) { prepare_gather(call, shard, sizes, group); });
}

std::shared_ptr<CheckedCall> scatter_call(const Group& group, const at::Tensor& whole,
                                          const std::string& reduce_by, const Sizes& sizes) {
  const ReduceOp reduce_op = check_reduce_op(kScatter, "tensor", whole.scalar_type(), reduce_by);
  return CheckedCalls::of_this_thread().take(
      key_of(kScatter, group, whole, static_cast<int64_t>(reduce_op), sizes),
      [&](CheckedCall& call) { prepare_scatter(call, whole, reduce_by, reduce_op, sizes, group); });
}

// Arguments: tensor, group name; sizes and rank.
void background_all_gather(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  at::Tensor output;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    const at::Tensor& shard = arguments.tensor(0);
    const auto call = gather_call(*group, shard, arguments.sizes(2, *group));
    output = start_transfer(kGather, group, *call, shard);
  };
  if (in_test_mode() || !guarded(kGather, arguments, 1, kAsync, body))
    return call_python(op, stack);
  arguments.end(std::move(output));
}

// Arguments: tensor, reduce op, group name; sizes and rank.
void background_reduce_scatter(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  at::Tensor output;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    const at::Tensor& whole = arguments.tensor(0);
    const auto call = scatter_call(*group, whole, arguments.text(1), arguments.sizes(3, *group));
    output = start_transfer(kScatter, group, *call, whole);
  };
  if (in_test_mode() || !guarded(kScatter, arguments, 2, kAsync, body))
    return call_python(op, stack);
  arguments.end(std::move(output));
}

// Arguments: tensor, group name, out. The shard may be this rank's part of `out`.
void background_all_gather_out(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const at::Tensor output = arguments.tensor(2);
  const auto body = [&](const std::shared_ptr<Group>& group) {
    const at::Tensor& shard = arguments.tensor(0);
    const auto call = gather_call(*group, shard, {});
    check_out(kGatherOut, "out", output, call->output_shape, shard.scalar_type());
    const auto* place =
        static_cast<const char*>(output.const_data_ptr()) + group->rank() * shard.nbytes();
    // A strided shard is copied first.
    TORCH_CHECK_VALUE(
        !shard.is_contiguous() || shard.const_data_ptr() == place || !overlap(shard, output),
        kGatherOut, ": tensor must not share memory with out, unless it is part ", group->rank(),
        " of it");
    start_transfer(kGatherOut, group, *call, shard, output);
  };
  if (in_test_mode() || !guarded(kGatherOut, arguments, 1, kAsync, body))
    return call_python(op, stack);
  arguments.end(output);
}

// Arguments: tensor, reduce op, group name, out.
void background_reduce_scatter_out(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const at::Tensor output = arguments.tensor(3);
  const auto body = [&](const std::shared_ptr<Group>& group) {
    const at::Tensor& whole = arguments.tensor(0);
    const auto call = scatter_call(*group, whole, arguments.text(1), {});
    check_out(kScatterOut, "out", output, call->output_shape, whole.scalar_type());
    TORCH_CHECK_VALUE(!whole.is_contiguous() || !overlap(whole, output), kScatterOut,
                      ": tensor must not share memory with out");
    start_transfer(kScatterOut, group, *call, whole, output);
  };
  if (in_test_mode() || !guarded(kScatterOut, arguments, 2, kAsync, body))
    return call_python(op, stack);
  arguments.end(output);
}

}  // namespace

void release_dropped_results() { Transfers::instance().release(); }

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  m.impl(kGatherOut, torch::CppFunction::makeFromBoxedFunction<&background_all_gather_out>());
  m.impl(kScatterOut, torch::CppFunction::makeFromBoxedFunction<&background_reduce_scatter_out>());
  for (const char* name : {"_low_contention_all_gather", "_low_contention_all_gather_split"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&background_all_gather>());
  for (const char* name :
       {"_low_contention_reduce_scatter", "_low_contention_reduce_scatter_split"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&background_reduce_scatter>());
}

}  // namespace symm_cp
