// Why the ranks of a group gave up, noted in the group's store: ranks on other hosts only see that
// the links to them break, when their processes end.
//
// A rank notes its failure before its call raises, so before its process can end because of it.
// Hence whoever loses a link to it finds the note; a rank without one was lost itself.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace symm_cp {

// For another thread; stores in Python may have no such copies.
c10::intrusive_ptr<c10d::Store> copy_of(const c10::intrusive_ptr<c10d::Store>& store);

// How long to wait for a store when the note would only spare peers a wait.
inline constexpr std::chrono::seconds kNotePatience{1};

// Does nothing any more once the store has not answered within `kNotePatience`: it may be behind a
// link that is down. For one thread.
class FailureNotes {
 public:
  // Removes what an earlier group of that name has left.
  FailureNotes(c10::intrusive_ptr<c10d::Store> store, int rank);

  // Returns when the store has the failure of this rank's last call; an empty text: it succeeded.
  void write(const std::string& failure);
  // Returns the failure of the last call of a rank; empty: there is none, or it is not known.
  std::string read(int rank);

 private:
  struct Shared;  // with threads that still wait for the store
  using Ask = std::function<std::optional<std::string>(c10d::Store& store)>;

  std::optional<std::string> ask(Ask what);

  std::shared_ptr<Shared> shared_;
  int rank_;
  bool answers_ = true;
  bool written_ = false;
};

}  // namespace symm_cp
