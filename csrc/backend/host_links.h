// Messages between the ranks of a group that are on different hosts, over another backend (gloo).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "rendezvous/failure_notes.h"

namespace symm_cp {

// Bytes for a rank, or from it.
struct Parcel {
  int rank;
  Extent bytes;
};

class HostLinks {
 public:
  // `transport`: a backend of all ranks of the group. Users' messages on it have tags below
  // `kFirstTag`.
  HostLinks(c10::intrusive_ptr<c10d::Backend> transport, c10::intrusive_ptr<c10d::Store> store,
            int rank)
      : transport_(std::move(transport)), notes_(std::move(store), rank), rank_(rank) {}

  static constexpr int kFirstTag = 1 << 30;

  // Sends and receives all parcels at once. The call's name precedes each parcel, so that ranks
  // detect different calls; a rank that has failed (`failure`) sends the reason instead. Returns
  // when all transfers have ended, so that the ranks stay in step whatever happens. Throws
  // PeerError: this rank's failure, else the first of a peer or a link. A link breaks when the
  // peer's process ends after a failed call; then the error quotes that rank's note.
  void exchange(const std::string& call_name, const std::string& failure,
                const std::vector<Parcel>& sends, const std::vector<Parcel>& receives,
                std::chrono::milliseconds timeout);

  // Notes for the ranks on other hosts how this rank's call ended; an empty text: it succeeded.
  void note(const std::string& failure) { notes_.write(failure); }

  const c10::intrusive_ptr<c10d::Backend>& transport() const { return transport_; }

 private:
  c10::intrusive_ptr<c10d::Backend> transport_;
  FailureNotes notes_;
  int rank_;
};

}  // namespace symm_cp
