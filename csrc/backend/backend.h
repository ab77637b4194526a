// A backend of torch.distributed for CPU tensors of the ranks of one host: "symm_cp".
//
// Synchronous calls run in the calling thread and return no work; the group's copy engine carries
// out asynchronous calls. Each call is one or several exchanges (exchange.h) and the tensors that
// it reads and writes.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/backend_tensors.h"
#include "backend/backend_work.h"
#include "rendezvous/peers.h"

namespace symm_cp {

class Group;
class Messages;

class Backend : public c10d::Backend {
 public:
  // Collective: finds the other ranks, so that a rank that dies is noticed from then on. `name`
  // names the process group. Throws c10::DistBackendError when a rank does not arrive in time.
  Backend(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, int size,
          std::chrono::milliseconds timeout);
  ~Backend() override;

  const std::string getBackendName() const override { return "symm_cp"; }
  // A copy: torch changes the parent's options when it splits a group.
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<Options>& opts, const int& rank,
                                          const int& size) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_number_.load(); }
  // Ends waiting calls with an error; later calls throw. Does not wait.
  void abort() override;
  // Returns when the works in flight have ended.
  void shutdown() override;

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(
      std::vector<std::vector<at::Tensor>>& output_lists, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int destination,
                                      int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int source,
                                      int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

  const std::shared_ptr<Peers>& peers() const { return peers_; }

 private:
  // torch passes "unset" (not positive) where the group's time-out applies.
  static std::chrono::milliseconds of_call(std::chrono::milliseconds timeout) {
    return timeout.count() > 0 ? timeout : kGroupTimeout;
  }
  // How a call is made; `op` is the name of torch.distributed's function.
  struct Manner {
    const char* op;
    c10d::OpType type;
    bool async;
    std::chrono::milliseconds timeout;
    int exchanges = 1;  // how many the call makes
  };

  // Throws if the group can make no calls.
  void prepare(const char* op);
  c10::intrusive_ptr<c10d::Work> carry_out(const Manner& manner, Collective collective);
  // Reports to the peers, which may be making this call, that this rank refuses it.
  void refuse_call(const Manner& manner, const std::string& reason);

  template <class Options>
  static Manner manner(const char* op, c10d::OpType type, const Options& opts,
                       size_t exchanges = 1) {
    return {op, type, opts.asyncOp, of_call(opts.timeout), static_cast<int>(exchanges)};
  }

  // `describe` fills a collective, or throws if the tensors do not fit; the error is reported to
  // the peers.
  template <class Describe>
  c10::intrusive_ptr<c10d::Work> call(const Manner& manner, Describe describe);
  c10::intrusive_ptr<c10d::Work> sparse_allreduce(const std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceOptions& opts);
  c10::intrusive_ptr<c10d::Work> start_all(Group& group, const Manner& manner,
                                           Collective collective);
  c10::intrusive_ptr<c10d::Work> meet(const Manner& manner);
  c10::intrusive_ptr<c10d::Work> receive(const char* op, c10d::OpType type,
                                         const std::vector<at::Tensor>& tensors, int source,
                                         int tag);
  void throw_if_aborted(const char* op) const;
  Messages& messages(const char* op);
  // How long a call waits for its peers.
  std::chrono::milliseconds wait_limit() const;
  // The group of this process group, made at the first call.
  Group& group(const char* op);
  void find_peers();

  // Add an exchange to a collective:
  // `root`: the only rank that takes the result.
  void add_all_reduce(Collective& collective, const char* op, CallName name,
                      const at::Tensor& tensor, const c10d::ReduceOp& reduce_op,
                      std::optional<int64_t> root, bool aside = false) const;
  void add_all_gather(Collective& collective, const char* op, const at::Tensor& output,
                      const at::Tensor& input, bool aside = false) const;
  void add_all_gather(Collective& collective, const char* op,
                      const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                      bool aside) const;
  void add_reduce_scatter(Collective& collective, const char* op, const at::Tensor& output,
                          const at::Tensor& input, const c10d::ReduceOp& reduce_op,
                          bool aside = false) const;
  // Throws ValueError unless a list has an item for each rank.
  void check_count(const char* op, const char* argument, size_t count) const;
  void check_root(const char* op, int64_t root) const;

  std::string name_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<bool> aborted_{false};
  std::atomic<uint64_t> sequence_number_{0};
  int forks_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<Peers> peers_;
  std::mutex mutex_;
  std::shared_ptr<Group> group_;
  std::shared_ptr<Messages> messages_;
  std::atomic<Group*> known_group_{nullptr};
};

// The peers that the backend of a process group has found; null for other backends.
std::shared_ptr<Peers> peers_of_backend(const std::string& name);

}  // namespace symm_cp
