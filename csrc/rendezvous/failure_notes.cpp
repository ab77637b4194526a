#include "rendezvous/failure_notes.h"

#include <mutex>
#include <utility>

#include "base/helper_thread.h"
#include "rendezvous/store_bootstrap.h"

namespace symm_cp {

namespace {

std::string key_of(int rank) { return "symm_cp/failure/" + std::to_string(rank); }

}  // namespace

c10::intrusive_ptr<c10d::Store> copy_of(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;
  }
}

struct FailureNotes::Shared {
  std::mutex mutex;  // of the copy
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::Store> copy;  // made when first needed
};

FailureNotes::FailureNotes(c10::intrusive_ptr<c10d::Store> store, int rank)
    : shared_(std::make_shared<Shared>()), rank_(rank) {
  StoreBootstrap(store, store->getTimeout()).set(key_of(rank), "");
  shared_->store = std::move(store);
}

std::optional<std::string> FailureNotes::ask(Ask what) {
  if (!answers_) return std::nullopt;
  using Value = std::optional<std::string>;
  const auto said = run_for<Value>(kNotePatience, [shared = shared_, what = std::move(what)] {
    try {
      std::lock_guard<std::mutex> lock(shared->mutex);
      if (!shared->copy) shared->copy = copy_of(shared->store);
      return what(*shared->copy);
    } catch (const std::exception&) {  // the lost rank may host the store
      return Value();
    }
  });
  answers_ = said.has_value();
  return said.value_or(std::nullopt);
}

void FailureNotes::write(const std::string& failure) {
  if (failure.empty() && !written_) return;
  written_ = !failure.empty();
  ask([key = key_of(rank_), failure](c10d::Store& store) {
    write_text(store, key, failure);
    return read_text(store, key);  // a store may return from `set` before it has the value
  });
}

std::string FailureNotes::read(int rank) {
  return ask([key = key_of(rank)](c10d::Store& store) { return read_text(store, key); })
      .value_or("");
}

}  // namespace symm_cp
