// Tells when the process of a rank ends that has never said anything: gloo connects all ranks of a
// group when the group is made, and a connection that breaks fails what waits for it.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <map>
#include <memory>
#include <thread>
#include <utility>

namespace symm_cp {

class LinkProbe {
 public:
  // Null where the backend does not tell; then only a time-out does.
  static std::unique_ptr<LinkProbe> of(c10::intrusive_ptr<c10d::Backend> backend) {
    if (!backend || backend->getBackendName() != "gloo") return nullptr;
    return std::unique_ptr<LinkProbe>(new LinkProbe(std::move(backend)));
  }

  // Whether the link to a rank is broken. The first question only begins to look.
  bool lost(int rank) {
    auto& probe = probes_[rank];
    if (probe == nullptr) probe = std::make_unique<Probe>(*backend_, rank);
    return probe->broken;
  }

 private:
  // Receives what is never sent. Waiting for it with a short time-out would break the link itself,
  // so a thread waits without one until it is told to stop.
  struct Probe {
    Probe(c10d::Backend& backend, int rank) {
      std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
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
      } catch (const std::exception&) {  // it has ended by itself
      }
      waiter.join();
    }
    static constexpr int kTag = 0x53434d;
    c10::intrusive_ptr<c10d::Work> work;
    std::atomic<bool> broken{false};
    std::thread waiter;
  };

  explicit LinkProbe(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::map<int, std::unique_ptr<Probe>> probes_;
};

}  // namespace symm_cp
