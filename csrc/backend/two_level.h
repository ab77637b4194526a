// The backend of a group whose ranks are on several hosts: shared memory within a host, links
// between hosts.
//
// Ranks with the same number on their hosts are a column. A reduction first sums within each host,
// where each rank sums a part; then in each column; then it gathers the parts within each host.
// Other collectives send each byte between two hosts once, and share it within the host. All links
// are busy at once.
//
// 16-bit sums are rounded twice: within a host, and between hosts.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "backend/backend.h"
#include "backend/host_links.h"

namespace symm_cp {

// Where the ranks of a group are; every host has the same number of ranks.
struct Spread {
  // `by_host`: the ranks of the first host, of the second, and so on.
  Spread(int rank, int size, const int32_t* by_host, int hosts);

  std::vector<std::vector<int>> ranks;  // by host and number on the host
  int host = 0;                         // of this rank
  int place = 0;                        // its number on the host
};

// The steps of one exchange.
struct Stages {
  std::string call_name;
  std::vector<Exchange> first;          // within the host,
  std::vector<Parcel> sends, receives;  // then between hosts,
  std::function<void()> then;           // then with the received data,
  std::vector<Exchange> last;           // then within the host
  std::vector<at::Tensor> scratch;
};

// The part of a collective that is known before its tensors: the ranks that take part.
struct Routing {
  c10d::OpType type;
  int root;  // -1: none
};

class TwoLevelBackend : public Backend {
 public:
  // `local`: the process group of the ranks on this host, and the reference that keeps it alive.
  // `transport`: a backend of all ranks.
  TwoLevelBackend(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, int size,
                  std::chrono::milliseconds timeout, Spread spread,
                  c10::intrusive_ptr<c10d::ProcessGroup> local, std::shared_ptr<void> local_object,
                  c10::intrusive_ptr<c10d::Backend> transport);
  ~TwoLevelBackend() override;

  bool supportsSplitting() const override { return false; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void abort() override;
  void shutdown() override;

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

 protected:
  void prepare(const char* op) override;
  c10::intrusive_ptr<c10d::Work> carry_out(const Manner& manner, Collective collective) override;
  void refuse_call(const Manner& manner, const std::string& reason) override;

 private:
  int hosts() const { return static_cast<int>(spread_.ranks.size()); }
  int places() const { return static_cast<int>(spread_.ranks.front().size()); }
  // The ranks on this host; the ranks with this rank's place on other hosts; all ranks on other
  // hosts.
  const std::vector<int>& here() const { return spread_.ranks[spread_.host]; }
  std::vector<int> column() const;
  std::vector<int> ranks_on_other_hosts() const;
  // The host and the place of a rank.
  std::pair<int, int> seat(int rank) const;

  Stages stages(const Routing& routing, const Exchange& exchange,
                std::chrono::milliseconds timeout);
  Stages refused(const Routing& routing, const std::string& call_name) const;
  void all_reduce(Stages& stages, const Exchange& exchange, std::chrono::milliseconds timeout);
  void reduce_to(Stages& stages, const Exchange& exchange, int root);
  void reduce_scatter(Stages& stages, const Exchange& exchange);
  void all_gather(Stages& stages, const Exchange& exchange);
  void broadcast(Stages& stages, const Exchange& exchange, int root);
  void gather(Stages& stages, const Exchange& exchange, int root);
  void scatter(Stages& stages, const Exchange& exchange, int root);
  void all_to_all(Stages& stages, const Exchange& exchange);
  std::function<void()> split_sum(Stages& stages, const Exchange& exchange, Extent mine,
                                  std::chrono::milliseconds timeout);

  // Carries the stages out or, given a failure, reports it to all ranks. Throws.
  void run_stages(Stages stages, std::string failure, std::chrono::milliseconds timeout);
  void run_here(Exchange exchange);
  void refuse_here(const std::string& reason);
  Group& local_group();

  // A separate thread carries out the calls one after the other.
  void enqueue(std::function<void()> call);
  void carry_out_all();

  Spread spread_;
  std::shared_ptr<void> local_object_;
  c10::intrusive_ptr<c10d::ProcessGroup> local_;
  HostLinks links_;
  std::shared_ptr<Group> local_group_;

  std::mutex queue_mutex_;
  std::condition_variable queue_changed_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace symm_cp
