// A lowered schedule without Python steps, in the three pieces that a transfer may need.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "channel/wire.h"

namespace symm_cp {

struct Plan {
  Plan(std::vector<Command> commands, std::vector<Reference> refer, std::string name)
      : whole(std::move(commands)), references(std::move(refer)), call_name(std::move(name)) {
    const auto signals = [](const Command& command) { return command.kind == Kind::kSignal; };
    // Without signals (one rank) all steps come first.
    auto first = std::find_if(whole.begin(), whole.end(), signals);
    first = std::find_if_not(first, whole.end(), signals);
    publish.assign(whole.begin(), first);
    rest.assign(first, whole.end());
  }

  std::vector<Command> publish;  // up to the first signals: hands this rank's data to the peers
  std::vector<Command> rest;     // the later steps
  std::vector<Command> whole;    // both
  std::vector<Reference> references;
  std::string call_name;  // shown in errors, and compared by the peers
};

}  // namespace symm_cp
