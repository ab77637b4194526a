// What Python holds for one channel of a group.
#pragma once

#include <memory>

#include "channel.h"
#include "lane.h"

namespace symm_cp {

struct Workspace {
  std::shared_ptr<Channel> channel;
  std::shared_ptr<Lane> lane;
};

}  // namespace symm_cp
