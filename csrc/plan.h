// A lowered schedule without Python steps, in the three pieces that a transfer may need.
#pragma once

#include <string>
#include <vector>

#include "channel.h"

namespace symm_cp {

struct Plan {
  std::vector<Command> publish;  // up to the first signals: hands this rank's data to the peers
  std::vector<Command> rest;     // what follows
  std::vector<Command> whole;    // both
  std::vector<Reference> references;
  std::string what;  // names the call in errors and to the peers
};

}  // namespace symm_cp
