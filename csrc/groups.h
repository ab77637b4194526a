// The groups of this process by the names that torch gives them.
#pragma once

#include <memory>
#include <string>

namespace symm_cp {

class Group;

// Returns the group of that name, which is made at its first use: that runs Python
// (symm_cp.memory.resolve), so this takes Python's lock if need be. Throws std::invalid_argument
// where there is no such process group, std::runtime_error where it cannot be made. Afterwards a
// look-up costs less than a microsecond. A group may span hosts: see Group::on_one_host.
std::shared_ptr<Group> group_of(const std::string& name);

}  // namespace symm_cp
