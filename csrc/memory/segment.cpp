#include "memory/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/error.h"

#ifndef MFD_HUGE_SHIFT
#define MFD_HUGE_SHIFT 26
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace symm_cp {

namespace {
constexpr unsigned kHugePageLog = 21;
constexpr size_t kHugePage = size_t{1} << kHugePageLog;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

// The memory that can be taken without invoking the OOM killer: the lesser of the numbers of the
// system and of the container (control groups, version 2).
size_t available_memory() {
  size_t available = SIZE_MAX;
  std::ifstream meminfo("/proc/meminfo");
  std::string name, unit;
  size_t value = 0;
  while (meminfo >> name >> value >> unit)
    if (name == "MemAvailable:") available = value * 1024;
  size_t limit = 0, used = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit &&
      std::ifstream("/sys/fs/cgroup/memory.current") >> used && limit > used)
    available = std::min(available, limit - used);
  return available;
}

size_t round_to_huge_pages(size_t size) { return (size + kHugePage - 1) / kHugePage * kHugePage; }

// The system's huge pages may be reserved for another program: takes them only on request.
bool asks_for_reserved_pages() {
  const char* chosen = std::getenv("SYMM_CP_HUGE_PAGES");
  return chosen != nullptr && std::strcmp(chosen, "1") == 0;
}

}  // namespace

int Descriptor::release() { return std::exchange(fd_, -1); }

void Descriptor::reset() {
  if (fd_ >= 0) close(release());
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

void attach_descriptors(msghdr& header, void* control, const std::vector<int>& fds) {
  const size_t bytes = fds.size() * sizeof(int);
  header.msg_control = control;
  header.msg_controllen = CMSG_SPACE(bytes);
  cmsghdr* rights = CMSG_FIRSTHDR(&header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(bytes);
  std::memcpy(CMSG_DATA(rights), fds.data(), bytes);
}

size_t round_to_pages(size_t size) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size == 0 ? page : (size + page - 1) / page * page;
}

std::string owned_label(const std::string& owner) {
  constexpr size_t kLongest = 200;  // memfd_create takes 249 bytes
  return ("symm_cp:" + std::to_string(getpid()) + ":" + owner).substr(0, kLongest);
}

bool Segment::take_reserved_pages(const std::string& label) {
  const size_t length = round_to_huge_pages(size_);
  Descriptor fd(memfd_create(label.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB |
                                                (kHugePageLog << MFD_HUGE_SHIFT)));
  if (!fd.valid() || ftruncate(fd.get(), static_cast<off_t>(length)) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0)
    return false;
  void* at = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (at == MAP_FAILED) return false;  // not enough huge pages are free
  if (madvise(at, length, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
    munmap(at, length);  // the control group does not allow so many
    return false;
  }
  fd_ = std::move(fd);
  data_ = static_cast<char*>(at);
  mapped_ = length;
  return true;
}

Segment Segment::create(size_t size, const std::string& label) {
  Segment segment;
  segment.size_ = round_to_pages(size);
  if (segment.size_ >= kHugePage && asks_for_reserved_pages() && segment.take_reserved_pages(label))
    return segment;
  segment.fd_ = Descriptor(memfd_create(label.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const std::string what = "shared memory of " + std::to_string(segment.size_) + " bytes";
  // For small segments reading the files would take too long.
  if (segment.size_ >= kHugePage && segment.size_ > available_memory()) {
    errno = ENOMEM;
    throw SystemError("cannot take " + what);
  }
  if (!segment.fd_.valid()) throw SystemError("cannot create " + what);
  if (ftruncate(segment.fd(), static_cast<off_t>(segment.size_)) != 0)
    throw SystemError("cannot reserve " + what);
  if (fcntl(segment.fd(), F_ADD_SEALS, kSeals) != 0) throw SystemError("cannot seal " + what);
  segment.attach(true);
  return segment;
}

Segment Segment::map(Descriptor fd, size_t size) {
  Segment segment;
  segment.size_ = size;
  segment.fd_ = std::move(fd);
  struct stat info{};
  if (fstat(segment.fd(), &info) != 0) throw SystemError("cannot inspect a peer's shared memory");
  const int seals = fcntl(segment.fd(), F_GET_SEALS);
  segment.mapped_ = static_cast<size_t>(info.st_size);
  const bool fits = segment.mapped_ == size || segment.mapped_ == round_to_huge_pages(size);
  if (!fits || seals < 0 || (seals & kSeals) != kSeals)
    throw PeerError("a peer's shared memory is not what it announced: needs " +
                    std::to_string(size) + " sealed bytes, got " + std::to_string(info.st_size));
  segment.attach(false);
  segment.fd_.reset();  // the mapping keeps the memory
  return segment;
}

void Segment::attach(bool populate) {
  mapped_ = std::max(mapped_, size_);
  void* at = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  const std::string what = "shared memory of " + std::to_string(size_) + " bytes";
  if (at == MAP_FAILED) throw SystemError("cannot map " + what);
  data_ = static_cast<char*>(at);
  if (size_ >= kHugePage) madvise(data_, size_, MADV_HUGEPAGE);  // only advice: may be refused
  if (populate && madvise(data_, size_, MADV_POPULATE_WRITE) != 0 && errno != EINVAL)
    throw SystemError("cannot take the pages for " + what);  // EINVAL: before Linux 5.14
}

Segment::Segment(Segment&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      mapped_(std::exchange(other.mapped_, 0)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, mapped_);
}

}  // namespace symm_cp
