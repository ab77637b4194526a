#include "failure_notes.h"

#include <chrono>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "python.h"
#include "store_bootstrap.h"

namespace symm_cp {

namespace {

constexpr std::chrono::seconds kPatience{1};

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
  const WithoutGil without_gil;
  shared_->store = std::move(store);
  StoreBootstrap(shared_->store).set(key_of(rank), "");
}

// The thread may wait for the store for good; nobody waits for the thread.
std::optional<std::string> FailureNotes::ask(Ask what) {
  if (!answers_) return std::nullopt;
  auto answer = std::make_shared<std::promise<std::optional<std::string>>>();
  auto answered = answer->get_future();
  std::thread([shared = shared_, answer, what = std::move(what)] {
    std::optional<std::string> said;
    try {
      std::lock_guard<std::mutex> lock(shared->mutex);
      if (!shared->copy) shared->copy = copy_of(shared->store);
      StoreBootstrap store(shared->copy);
      said = what(store);
    } catch (const std::exception&) {  // whoever keeps the store may be what was lost
    }
    answer->set_value(std::move(said));
  }).detach();
  answers_ = answered.wait_for(kPatience) == std::future_status::ready;
  return answers_ ? answered.get() : std::nullopt;
}

void FailureNotes::write(const std::string& failure) {
  if (failure.empty() && !written_) return;
  written_ = !failure.empty();
  ask([key = key_of(rank_), failure](Bootstrap& store) {
    store.set(key, failure);
    return store.get(key);  // a store may return from `set` before it has the value
  });
}

std::string FailureNotes::read(int rank) {
  return ask([key = key_of(rank)](Bootstrap& store) { return store.get(key); }).value_or("");
}

}  // namespace symm_cp
