// One-sided operations on symmetric memory: puts, gets and signals in NVSHMEM's and NCCL's forms,
// words that kernels wait for, and a matmul that waits for them. torch has these ops only on GPUs.
//
// torch enqueues them on a stream. Here an op is complete when it returns; an op that waits blocks
// the calling thread, up to the group's time-out.
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <cstring>
#include <thread>

#include "base/error.h"
#include "base/python.h"
#include "base/team.h"
#include "exchange/copy.h"
#include "memory/mapping.h"
#include "ops/as_torch.h"
#include "ops/kernels.h"

namespace symm_cp {

// Returns null for a handle that this package did not make; see symmetric_memory.cpp.
std::shared_ptr<Mapping> mapping_of_handle(c10d::symmetric_memory::SymmetricMemory& handle);

namespace {

using namespace kernels;
using c10d::symmetric_memory::SymmetricMemory;
using torch::jit::Stack;

// Runs a kernel and converts its errors to Python's.
template <class Body>
void checked(const char* op, const Arguments& arguments, const Body& body) {
  raising_as_torch([&] {
    arguments.check_memory(op);
    try {
      body();
    } catch (const c10::Error&) {
      throw;
    } catch (const std::exception& error) {
      TORCH_CHECK(false, op, ": ", error.what());
    }
  });
}

// The place of a tensor in the memory of all ranks, or in their signal pads.
struct RemotePlace {
  std::shared_ptr<Mapping> mapping;
  size_t offset;
  bool in_pad = false;
  char* at(int64_t rank) const {
    const auto& memory = in_pad ? mapping->pads() : mapping->data();
    return static_cast<char*>(memory[static_cast<size_t>(rank)]) + offset;
  }
};

RemotePlace place_of(const char* op, const char* name, const at::Tensor& tensor) {
  kernels::check_dense(op, name, tensor);
  TORCH_CHECK_VALUE(tensor.numel() > 0, op, ": ", name, " is empty");
  check_symmetric(op, name, tensor);
  const void* data = tensor.const_data_ptr();
  auto mapping = find_mapping(data);
  TORCH_CHECK_VALUE(mapping != nullptr, op, ": ", name,
                    " was not rendezvoused with the group of all ranks: call "
                    "symm_mem.rendezvous() on all ranks before");
  return {std::move(mapping), *symmetric_offset(data)};
}

// A signal is a number in symmetric memory, or in the signal pad of a handle.
RemotePlace place_of_signal(const char* op, const at::Tensor& tensor) {
  kernels::check_dense(op, "sigpad", tensor);
  if (const auto pad = find_pad(tensor.const_data_ptr())) return {pad->mapping, pad->offset, true};
  return place_of(op, "sigpad", tensor);
}

RemotePlace with_peer(const char* op, RemotePlace place, int64_t peer) {
  check_rank(op, "peer", peer, place.mapping->world_size());
  return place;
}

RemotePlace place_of(const char* op, const char* name, const at::Tensor& tensor, int64_t peer) {
  return with_peer(op, place_of(op, name, tensor), peer);
}

RemotePlace place_of_signal(const char* op, const at::Tensor& tensor, int64_t peer) {
  return with_peer(op, place_of_signal(op, tensor), peer);
}

void copy(const Mapping& mapping, void* to, const void* from, const at::Tensor& like) {
  const Team team(mapping.cores());
  if (to != from) copy_bytes(to, from, static_cast<int64_t>(like.nbytes()), false);
}

int64_t* number_at(const char* op, const at::Tensor& pad, char* at) {
  TORCH_CHECK_VALUE(pad.nbytes() >= sizeof(int64_t) && reinterpret_cast<uintptr_t>(at) % 8 == 0, op,
                    ": sigpad has ", pad.nbytes(), " bytes, must have 8, at a multiple of 8");
  return reinterpret_cast<int64_t*>(at);
}

// --- puts, gets and signals ----------------------------------------------------------------------

// Copies this rank's values to the same place in the peer's memory.
void put(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  checked(name_of(op), arguments, [&] {
    const at::Tensor& tensor = arguments.tensor(0);
    const RemotePlace place = place_of(name_of(op), "tensor", tensor, arguments.number(1));
    copy(*place.mapping, place.at(arguments.number(1)), tensor.const_data_ptr(), tensor);
  });
  arguments.end();
}

void get(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  checked(name_of(op), arguments, [&] {
    const at::Tensor& tensor = arguments.tensor(0);
    const RemotePlace place = place_of(name_of(op), "tensor", tensor, arguments.number(1));
    copy(*place.mapping, tensor.mutable_data_ptr(), place.at(arguments.number(1)), tensor);
  });
  arguments.end();
}

void nvshmem_put_with_signal(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  checked(name_of(op), arguments, [&] {
    const at::Tensor &tensor = arguments.tensor(0), &pad = arguments.tensor(1);
    const int64_t signal = arguments.number(2), peer = arguments.number(3);
    const RemotePlace place = place_of(name_of(op), "tensor", tensor, peer);
    const RemotePlace signals = place_of_signal(name_of(op), pad, peer);
    int64_t* number = number_at(name_of(op), pad, signals.at(peer));
    copy(*place.mapping, place.at(peer), tensor.const_data_ptr(), tensor);
    signals.mapping->put_number(static_cast<int>(peer), number, signal);
  });
  arguments.end();
}

void nvshmem_wait_for_signal(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  checked(name_of(op), arguments, [&] {
    const at::Tensor& pad = arguments.tensor(0);
    const int64_t signal = arguments.number(1), peer = arguments.number(2);
    const RemotePlace signals = place_of_signal(name_of(op), pad, peer);
    Mapping& mapping = *signals.mapping;
    mapping.await_number(number_at(name_of(op), pad, signals.at(mapping.rank())),
                         static_cast<int>(peer), name_of(op),
                         [&](int64_t seen) { return seen == signal; });
  });
  arguments.end();
}

// The signal is a number in the pad that torch gives a tensor.
void nccl_put_with_signal(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  checked(name_of(op), arguments, [&] {
    const at::Tensor& tensor = arguments.tensor(0);
    const int64_t signal = arguments.number(1), peer = arguments.number(2);
    const RemotePlace place = place_of(name_of(op), "tensor", tensor, peer);
    Mapping& mapping = *place.mapping;
    copy(*place.mapping, place.at(peer), tensor.const_data_ptr(), tensor);
    mapping.put_number(static_cast<int>(peer), mapping.number_of(static_cast<int>(peer)), signal);
  });
  arguments.end();
}

void nccl_wait_for_signal(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  checked(name_of(op), arguments, [&] {
    const int64_t signal = arguments.number(1);
    const RemotePlace place = place_of_signal(name_of(op), arguments.tensor(0));
    Mapping& mapping = *place.mapping;
    mapping.await_number(mapping.number_of(mapping.rank()), -1, name_of(op),
                         [&](int64_t seen) { return seen >= signal; });
  });
  arguments.end();
}

// This op counts its signals; each wait consumes one.
void nccl_put_signal(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  checked(name_of(op), arguments, [&] {
    const at::Tensor& source = arguments.tensor(0);
    const auto handle = arguments.at(1).toCustomClass<SymmetricMemory>();
    const int64_t peer = arguments.number(2);
    const auto mapping = mapping_of_handle(*handle);
    TORCH_CHECK_VALUE(mapping != nullptr, name_of(op), ": hdl is not of symmetric memory on CPU");
    kernels::check_dense(name_of(op), "src", source);
    check_rank(name_of(op), "peer", peer, mapping->world_size());
    const size_t room = handle->get_buffer_size() - handle->get_offset();
    TORCH_CHECK_VALUE(source.nbytes() <= room, name_of(op), ": src has ", source.nbytes(),
                      " bytes, hdl has ", room);
    char* to =
        static_cast<char*>(mapping->data()[static_cast<size_t>(peer)]) + handle->get_offset();
    copy(*mapping, to, source.const_data_ptr(), source);
    mapping->count_signal(static_cast<int>(peer));
  });
  arguments.end();
}

void nccl_wait_signal(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto handle = torch::jit::peek(*stack, 0, 2).toCustomClass<SymmetricMemory>();
  const auto mapping = mapping_of_handle(*handle);
  if (mapping == nullptr) {  // a handle of torch's own: calls torch's kernel, if there is one
    const c10::DispatchKeySet after(c10::DispatchKeySet::FULL_AFTER,
                                    c10::DispatchKey::BackendSelect);
    return op.redispatchBoxed(keys & after, stack);
  }
  Arguments arguments(op, stack);
  checked(name_of(op), arguments, [&] {
    const int64_t peer = arguments.number(1);
    check_rank(name_of(op), "peer", peer, mapping->world_size());
    mapping->take_signal(static_cast<int>(peer), name_of(op));
  });
  arguments.end();
}

// --- words ---------------------------------------------------------------------------------------

using AtomicWord = std::atomic<uint32_t>;

AtomicWord* words_of(const char* op, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.dim() == 1 && tensor.is_contiguous() && tensor.scalar_type() == at::ScalarType::UInt32,
      op, ": input is ", name_dtype(tensor.scalar_type()), " ", tensor.sizes(),
      ", must be a contiguous torch.uint32 tensor of 1 dimension");
  return static_cast<AtomicWord*>(tensor.mutable_data_ptr());
}

// Writes words in order; a reader that sees one also sees everything written before it.
void write_words(const char* op, const at::Tensor& input, int64_t offset, int64_t value,
                 int64_t count) {
  AtomicWord* words = words_of(op, input);
  TORCH_CHECK_VALUE(value >= 0 && value <= UINT32_MAX, op, ": val=", value,
                    " must be from 0 to 4294967295");
  TORCH_CHECK_VALUE(count > 0, op, ": count=", count, " must be positive");
  TORCH_CHECK_VALUE(offset >= 0 && offset <= input.numel() - count, op, ": ", count,
                    " words from offset=", offset, " are not in input, which has ", input.numel());
  for (int64_t i = 0; i < count; ++i)
    words[offset + i].store(static_cast<uint32_t>(value), std::memory_order_seq_cst);
}

void stream_write_value32(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const at::Tensor input = arguments.tensor(0);
  checked(name_of(op), arguments,
          [&] { write_words(name_of(op), input, arguments.number(1), arguments.number(2), 1); });
  arguments.end(input);
}

void memset32(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const at::Tensor input = arguments.tensor(0);
  checked(name_of(op), arguments, [&] {
    write_words(name_of(op), input, arguments.number(1), arguments.number(2), arguments.number(3));
  });
  arguments.end(input);
}

// Waits for a nonzero word. Its writer is unknown, so if the writer died only the time-out ends the
// wait.
void await_word(const AtomicWord& word, int64_t chunk) {
  const WithoutGil without_gil;
  WaitBudget budget(default_timeout());
  const Waiting waiting(budget);
  for (int64_t round = 0; word.load(std::memory_order_acquire) == 0; ++round) {
    if (round < 1000) continue;
    std::this_thread::sleep_for(std::chrono::microseconds(round < 2000 ? 10 : 500));
    throw_if_interrupted();
    budget.say_if_long("", [&] {
      return "_async_input_mm: waiting for the signal of chunk " + std::to_string(chunk) + " of a";
    });
    if (waiting.expired())
      throw PeerError("chunk " + std::to_string(chunk) + " of a was not signalled within " +
                      std::to_string(budget.limit.count()) + " ms");
  }
}

void async_input_mm(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  at::Tensor product;
  const char* name = name_of(op);
  checked(name, arguments, [&] {
    const at::Tensor &a = arguments.tensor(0), &b = arguments.tensor(1);
    const at::Tensor& signals = arguments.tensor(2);
    const int64_t pivot = arguments.number(3);
    TORCH_CHECK_VALUE(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0), name, ": a is ",
                      a.sizes(), " and b is ", b.sizes(), ", which cannot be multiplied");
    TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), name, ": a is ",
                     name_dtype(a.scalar_type()), ", b is ", name_dtype(b.scalar_type()));
    const AtomicWord* words = words_of(name, signals);
    const int64_t chunks = signals.numel();
    TORCH_CHECK_VALUE(chunks > 0 && a.size(0) % chunks == 0, name, ": a has ", a.size(0),
                      " rows, which is not divisible by ", chunks, " chunks, one for each signal");
    TORCH_CHECK_VALUE(pivot >= 0 && pivot < chunks, name, ": a_chunk_pivot=", pivot,
                      " must be one of ", chunks, " chunks");
    product = at::empty({a.size(0), b.size(1)}, a.options());
    const int64_t rows = a.size(0) / chunks;
    for (int64_t step = 0; step < chunks; ++step) {
      const int64_t chunk = (pivot + step) % chunks;
      await_word(words[chunk], chunk);
      at::Tensor part = product.narrow(0, chunk * rows, rows);
      at::mm_out(part, a.narrow(0, chunk * rows, rows), b);
    }
  });
  arguments.end(std::move(product));
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  for (const char* name : {"nvshmem_put", "nccl_put"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&put>());
  for (const char* name : {"nvshmem_get", "nccl_get"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&get>());
  m.impl("nvshmem_put_with_signal",
         torch::CppFunction::makeFromBoxedFunction<&nvshmem_put_with_signal>());
  m.impl("nvshmem_wait_for_signal",
         torch::CppFunction::makeFromBoxedFunction<&nvshmem_wait_for_signal>());
  m.impl("nccl_put_with_signal",
         torch::CppFunction::makeFromBoxedFunction<&nccl_put_with_signal>());
  m.impl("nccl_wait_for_signal",
         torch::CppFunction::makeFromBoxedFunction<&nccl_wait_for_signal>());
  m.impl("nccl_put_signal", torch::CppFunction::makeFromBoxedFunction<&nccl_put_signal>());
  m.impl("stream_write_value32_",
         torch::CppFunction::makeFromBoxedFunction<&stream_write_value32>());
  m.impl("memset32_", torch::CppFunction::makeFromBoxedFunction<&memset32>());
  m.impl("_async_input_mm", torch::CppFunction::makeFromBoxedFunction<&async_input_mm>());
}

// The op takes no tensor whose device could select the kernel, so the handle selects it.
TORCH_LIBRARY_IMPL(symm_mem, BackendSelect, m) {
  m.impl("nccl_wait_signal", torch::CppFunction::makeFromBoxedFunction<&nccl_wait_signal>());
}

}  // namespace symm_cp
