#include "base/sockets.h"

#include <sched.h>

#include <cstdlib>
#include <fstream>
#include <string>

namespace symm_cp {

namespace {

constexpr size_t kLeastOnSocket = 3;

int package_of(int cpu) {
  std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                     "/topology/physical_package_id");
  int package = -1;
  return file >> package ? package : -1;
}

}  // namespace

int own_socket(int rank, int world_size) {
  const char* wanted = std::getenv("SYMM_CP_SOCKETS");
  if (wanted != nullptr && *wanted != '\0') {
    const int sockets = std::atoi(wanted);
    return sockets < 1 ? -1 : kAsIf + static_cast<int>(int64_t{rank} * sockets / world_size);
  }
  // Finding the sockets means reading a file for each CPU; skips this if there are too few ranks
  // for two sockets.
  if (static_cast<size_t>(world_size) < 2 * kLeastOnSocket) return -1;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return -1;
  int socket = -1;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    const int package = package_of(cpu);
    if (package < 0 || (socket >= 0 && package != socket)) return -1;
    socket = package;
  }
  return socket;
}

int sockets_of(const std::vector<int>& by_rank) {
  const size_t ranks = by_rank.size();
  const size_t least = by_rank.front() >= kAsIf ? 2 : kLeastOnSocket;
  for (const size_t sockets : {size_t{2}, size_t{4}}) {
    const size_t each = ranks / sockets;
    if (each < least || ranks % sockets != 0) continue;
    bool divided = true;
    for (size_t rank = 0; rank < ranks; ++rank) {
      const int own = by_rank[rank];
      divided = divided && own >= 0 && own == by_rank[rank / each * each];
      // Earlier ranks must be on other sockets.
      for (size_t before = 0; before < rank / each * each; ++before)
        divided = divided && by_rank[before] != own;
    }
    if (divided) return static_cast<int>(sockets);
  }
  return 1;
}

}  // namespace symm_cp
