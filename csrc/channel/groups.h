// The groups of this process by the names that torch gives them.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

namespace symm_cp {

class Group;

// Returns the group of that name, which is made at its first use: that runs Python
// (symm_cp.group.memory.resolve), so this takes Python's lock if need be. Throws
// std::invalid_argument where there is no such process group, and std::runtime_error where the
// group cannot be made. Afterwards a look-up costs less than a microsecond. Never waits for peers,
// so whether the group spans hosts may not be known yet.
std::shared_ptr<Group> group_named(const std::string& name);

// Like `group_named`, but first determines whether the group spans hosts. Collective at the first
// call for a group.
std::shared_ptr<Group> group_of(const std::string& name);

// The group's ranks do not share memory.
struct SpansHosts : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Whether the ranks share memory could not be determined: a peer did not come, or Ctrl-C.
struct HostsUnknown : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Throws unless all ranks of a group share this host's memory. Collective, like `group_of`.
void require_one_host(const Group& group);

// Lets `group_named` find a group, as long as its process group and an owner exist.
void known_as(const std::shared_ptr<Group>& group);

// `find` makes a group and calls `known_as`; it returns 0, or passes the reason to `explain`. With
// `ask` it also determines whether the group spans hosts.
void on_unknown_group(int (*find)(const char* name, int ask));
void explain(const char* why);

// Like `explain`, after Ctrl-C has ended `find`; `group` is null if `find` had not made it yet.
// Python raises an exception of type `exception` as soon as it runs again: a callback cannot. Code
// that reports it to the peers must not look the group up again, which waits for them.
void explain_interruption(const std::shared_ptr<Group>& group, void* exception);
// Returns that group once, to the thread that looked it up; null after any other look-up.
std::shared_ptr<Group> take_interrupted();

}  // namespace symm_cp
