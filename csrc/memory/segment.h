// Anonymous shared memory (memfd): no name, so nothing can outlive the processes that map it.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <string>
#include <vector>

namespace symm_cp {

// Owns a file descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor() { reset(); }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release();
  void reset();

 private:
  int fd_ = -1;
};

// Attaches descriptors to a message; `control` must have room for them.
void attach_descriptors(msghdr& header, void* control, const std::vector<int>& fds);

// The label by which `symm-cp doctor` recognises this process's memory in /proc/PID/maps.
std::string owned_label(const std::string& owner);

// A mapping of a whole memfd, unmapped on destruction.
class Segment {
 public:
  Segment() = default;
  // Creates `size` bytes (rounded up to pages) of zeros, sealed against shrinking and growing. The
  // pages are taken now, so that a lack of memory is an error here that names the size, and not a
  // SIGBUS at a later write. With SYMM_CP_HUGE_PAGES=1 they are reserved huge pages of the system
  // (hugetlb), if enough are free.
  static Segment create(size_t size, const std::string& label);
  // Maps a descriptor received from a peer; refuses one that is not sealed or not `size` long.
  static Segment map(Descriptor fd, size_t size);
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  char* data() const { return data_; }
  size_t size() const { return size_; }
  int fd() const { return fd_.get(); }

 private:
  void attach(bool populate);
  bool take_reserved_pages(const std::string& label);

  Descriptor fd_;
  char* data_ = nullptr;
  size_t size_ = 0;
  size_t mapped_ = 0;  // `size_`, or more with huge pages
};

size_t round_to_pages(size_t size);

}  // namespace symm_cp
