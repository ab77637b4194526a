#include "channel/groups.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "base/python.h"
#include "channel/group.h"

namespace symm_cp {

namespace {

// Names are reused after a group is destroyed, so each entry also records its process group object.
struct KnownGroup {
  std::weak_ptr<Group> group;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> process_group;
};

struct KnownGroups {
  std::mutex mutex;
  std::unordered_map<std::string, KnownGroup> by_name;
};

// Never destroyed: threads may look groups up while the process ends.
KnownGroups& known_groups() {
  static auto* all = new KnownGroups;
  return *all;
}

std::atomic<int (*)(const char*, int)> find_in_python{nullptr};
thread_local std::string explanation;
thread_local std::shared_ptr<Group> interrupted;
thread_local void* interruption = nullptr;

c10::intrusive_ptr<c10d::ProcessGroup> process_group_of(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    throw std::invalid_argument("group: there is no process group named '" + name + "'");
  }
}

std::shared_ptr<Group> known_group(const std::string& name, const c10d::ProcessGroup* of) {
  KnownGroups& all = known_groups();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_name.find(name);
  if (found == all.by_name.end() || found->second.process_group._unsafe_get_target() != of)
    return nullptr;
  return found->second.group.lock();
}

std::shared_ptr<Group> find(const std::string& name, bool ask) {
  const auto process_group = process_group_of(name);
  auto known = known_group(name, process_group.get());
  if (known != nullptr && (!ask || known->on_one_host())) return known;
  const auto find = find_in_python.load();
  if (find == nullptr) throw std::runtime_error("symm_cp is not imported");
  interrupted = nullptr;
  const bool found = find(name.c_str(), ask ? 1 : 0) == 0;
  if (interruption != nullptr) raise_later(std::exchange(interruption, nullptr));
  if (!found) throw std::runtime_error(explanation);
  known = known_group(name, process_group.get());
  if (known == nullptr) throw std::runtime_error("group '" + name + "' is being destroyed");
  return known;
}

}  // namespace

std::shared_ptr<Group> group_named(const std::string& name) { return find(name, false); }
std::shared_ptr<Group> group_of(const std::string& name) { return find(name, true); }

void require_one_host(const Group& group) {
  std::shared_ptr<Group> known;
  try {
    known = group_of(group.name());
  } catch (const std::exception& error) {
    throw HostsUnknown(error.what());
  }
  if (!*known->on_one_host()) throw SpansHosts("group '" + group.name() + "' spans hosts");
}

void known_as(const std::shared_ptr<Group>& group) {
  const auto process_group = process_group_of(group->name());
  KnownGroups& all = known_groups();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.by_name.insert_or_assign(
      group->name(), KnownGroup{group, c10::weak_intrusive_ptr<c10d::ProcessGroup>(process_group)});
}

void on_unknown_group(int (*find)(const char* name, int ask)) { find_in_python.store(find); }

void explain(const char* why) { explanation = why; }

void explain_interruption(const std::shared_ptr<Group>& group, void* exception) {
  explanation = "interrupted by a signal";
  interrupted = group;
  interruption = exception;
}

std::shared_ptr<Group> take_interrupted() { return std::exchange(interrupted, nullptr); }

}  // namespace symm_cp
