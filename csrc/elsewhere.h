// Threads for what must not hold up those that carry out collectives: callbacks of futures, which
// may wait for other collectives.
#pragma once

#include <functional>

namespace symm_cp {

// Runs a task in another thread, at once: none waits for one that blocks. It must not throw.
void run_elsewhere(std::function<void()> task);

}  // namespace symm_cp
