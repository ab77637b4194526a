// Whose memory an address is in, as the driver knows of a GPU's: symmetric memory is shared memory,
// and this process keeps the descriptors of its own blocks, not those of its peers'.
#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>

#include "driver_model.h"

namespace simulated {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kFresh = std::chrono::milliseconds(200);

struct Range {
  Address end;
  Owner owner;
};

std::set<ino_t> own_inodes() {
  std::set<ino_t> inodes;
  DIR* folder = opendir("/proc/self/fd");
  while (const dirent* entry = folder != nullptr ? readdir(folder) : nullptr) {
    struct stat info{};
    const std::string path = std::string("/proc/self/fd/") + entry->d_name;
    if (stat(path.c_str(), &info) == 0) inodes.insert(info.st_ino);
  }
  if (folder != nullptr) closedir(folder);
  return inodes;
}

std::map<Address, Range> scan() {
  std::map<Address, Range> ranges;
  const auto own = own_inodes();
  std::FILE* maps = std::fopen("/proc/self/maps", "r");
  char line[1024];
  while (maps != nullptr && std::fgets(line, sizeof line, maps) != nullptr) {
    Address begin = 0, end = 0;
    char access[8]{}, device[16]{};
    uint64_t offset = 0, inode = 0;
    if (std::sscanf(line, "%" SCNx64 "-%" SCNx64 " %7s %" SCNx64 " %15s %" SCNu64, &begin, &end,
                    access, &offset, device, &inode) != 6)
      continue;
    const bool symmetric = access[3] == 's' && std::strstr(line, "memfd:symm_cp") != nullptr;
    const Owner owner = !symmetric         ? Owner::kOrdinary
                        : own.count(inode) ? Owner::kOwn
                                           : Owner::kPeer;
    ranges[begin] = {end, owner};
  }
  if (maps != nullptr) std::fclose(maps);
  return ranges;
}

struct Write {
  Address to = 0;
  size_t bytes = 0;
  const char* name = "";
};

struct Memory {
  std::mutex mutex;
  std::map<Address, Range> ranges;
  Clock::time_point scanned{};
  std::mutex writes_mutex;
  std::vector<Write> writes = std::vector<Write>(4096);  // a ring
  size_t next = 0;
};
Memory& memory() {
  static Memory* it = new Memory;
  return *it;
}

const Range* find(const std::map<Address, Range>& ranges, Address address) {
  auto next = ranges.upper_bound(address);
  if (next == ranges.begin()) return nullptr;
  const Range& range = std::prev(next)->second;
  return address < range.end ? &range : nullptr;
}

}  // namespace

Owner owner_of(Address address) {
  Memory& it = memory();
  std::lock_guard<std::mutex> lock(it.mutex);
  const Range* range = find(it.ranges, address);
  const bool old = Clock::now() - it.scanned > kFresh;
  // What it was may have been unmapped, and the place be taken by something else.
  if (range == nullptr || old) {
    it.ranges = scan();
    it.scanned = Clock::now();
    range = find(it.ranges, address);
  }
  return range == nullptr ? Owner::kOrdinary : range->owner;
}

Owner owner_now(Address address) {
  {
    std::lock_guard<std::mutex> lock(memory().mutex);
    memory().ranges.clear();
  }
  return owner_of(address);
}

void note_write(Address to, size_t bytes, const char* name) {
  Memory& it = memory();
  std::lock_guard<std::mutex> lock(it.writes_mutex);
  it.writes[it.next++ % it.writes.size()] = {to, bytes, name};
}

std::string last_write(Address address, size_t bytes) {
  Memory& it = memory();
  std::lock_guard<std::mutex> lock(it.writes_mutex);
  for (size_t i = 1; i <= it.writes.size(); ++i) {
    const Write& write = it.writes[(it.next + it.writes.size() - i) % it.writes.size()];
    if (write.bytes > 0 && write.to < address + bytes && address < write.to + write.bytes)
      return std::string(write.name) + " of " + std::to_string(write.bytes) + " bytes";
  }
  return "no command of the driver";
}

}  // namespace simulated
