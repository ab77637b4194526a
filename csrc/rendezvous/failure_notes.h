// Records in a group's store why its ranks failed: otherwise ranks on other hosts only see links
// break when the failed ranks' processes end.
//
// A rank notes its failure before its call raises, so before its process can end because of it.
// Hence a rank that loses a link to it finds the note; without a note, the rank itself was lost.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace symm_cp {

// Clones a store for another thread; returns the store itself if it has no clone (in Python).
c10::intrusive_ptr<c10d::Store> copy_of(const c10::intrusive_ptr<c10d::Store>& store);

// How long to wait for a store when the note would only spare peers a wait.
inline constexpr std::chrono::seconds kNotePatience{1};

// Stops using the store once it has not answered within `kNotePatience`: the store may be behind a
// broken link. For one thread.
class FailureNotes {
 public:
  // Removes the note that an earlier group of that name has left.
  FailureNotes(c10::intrusive_ptr<c10d::Store> store, int rank);

  // Returns when the store has the failure of this rank's last call; an empty text: it succeeded.
  void write(const std::string& failure);
  // Returns the failure of the last call of a rank; empty: there is none, or it is not known.
  std::string read(int rank);

 private:
  struct Shared;  // shared with threads that still wait for the store
  using Ask = std::function<std::optional<std::string>(c10d::Store& store)>;

  std::optional<std::string> ask(Ask what);

  std::shared_ptr<Shared> shared_;
  int rank_;
  bool answers_ = true;
  bool written_ = false;
};

}  // namespace symm_cp
