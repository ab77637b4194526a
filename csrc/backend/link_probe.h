// Detects that a rank's process has ended before its first call: the ranks of a group are connected
// when the group is made. This package's backend watches its peers; with gloo a pending receive
// fails when the connection breaks.
#pragma once

#include <ATen/EmptyTensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "backend/backend.h"
#include "rendezvous/peers.h"

namespace symm_cp {

class LinkProbe {
 public:
  // Null for backends that do not report broken connections; then only the time-out applies.
  static std::unique_ptr<LinkProbe> of(c10::intrusive_ptr<c10d::Backend> backend,
                                       const std::string& group) {
    if (!backend) return nullptr;
    auto peers = backend->getBackendName() == "symm_cp" ? peers_of_backend(group) : nullptr;
    if (peers == nullptr && backend->getBackendName() != "gloo") return nullptr;
    return std::unique_ptr<LinkProbe>(new LinkProbe(std::move(backend), std::move(peers)));
  }

  // The rank whose loss may keep `rank` from sending: `rank` itself if its link is broken, or a
  // dead rank whose message `rank` has missed (Board::missed). With another backend, the first call
  // for a rank only starts its probe.
  std::optional<int> lost(int rank) {
    if (peers_ != nullptr) {
      if (peers_->dead(rank)) return rank;
      const auto missed = peers_->board(rank).missed();
      return missed && peers_->dead(*missed) ? missed : std::nullopt;
    }
    auto& probe = probes_[rank];
    if (probe == nullptr) probe = std::make_unique<Probe>(*backend_, rank);
    return probe->broken ? std::optional<int>(rank) : std::nullopt;
  }

 private:
  // Receives a message that is never sent. A short time-out would break the link itself, so a
  // thread waits until it is aborted.
  struct Probe {
    Probe(c10d::Backend& backend, int rank) {
      // Bypasses torch's dispatcher: under the caller's modes or transforms the tensor may not be
      // plain, and gloo's refusal of it would look like a broken link.
      std::vector<at::Tensor> nothing{at::detail::empty_cpu({1}, at::kByte)};
      try {
        work = backend.recv(nothing, rank, kTag);
      } catch (const std::exception&) {
        broken = true;
        return;
      }
      waiter = std::thread([this] {
        try {
          work->wait(std::chrono::hours(24 * 365));
        } catch (const std::exception&) {
          broken = true;
        }
      });
    }
    ~Probe() {
      if (!waiter.joinable()) return;
      try {
        work->abort();
      } catch (const std::exception&) {  // it has ended already
      }
      waiter.join();
    }
    static constexpr int kTag = 0x53434d;
    c10::intrusive_ptr<c10d::Work> work;
    std::atomic<bool> broken{false};
    std::thread waiter;
  };

  LinkProbe(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<Peers> peers)
      : backend_(std::move(backend)), peers_(std::move(peers)) {}

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::shared_ptr<Peers> peers_;  // of this package's backend
  std::map<int, std::unique_ptr<Probe>> probes_;
};

}  // namespace symm_cp
