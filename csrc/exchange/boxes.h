// The data of an exchange with strides: boxes of tensors, copied straight to their destinations.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "channel/wire.h"
#include "exchange/copy.h"

namespace symm_cp {

class Boxes {
 public:
  using Operands = std::vector<char*>;

  // `given` and `taken` are in order of peers and pieces. The boxes that a rank gives to itself
  // have equal sizes and the same order in both.
  Boxes(std::vector<Box> given, std::vector<Box> taken, int world_size);

  int64_t pieces() const { return pieces_; }
  // The bytes for or from each rank.
  std::vector<int64_t> given_bytes() const { return given_.bytes; }
  std::vector<int64_t> taken_bytes() const { return taken_.bytes; }
  // Throws std::invalid_argument unless each piece fits into a part of the slot of `room` bytes.
  void check_room(const std::string& call_name, int64_t room) const;

  // The copies of a piece. `operands` are the addresses of the tensors.
  std::vector<PlaneCopy> gives(int peer, int64_t piece, const Operands& operands, char* slot,
                               bool streaming) const;
  std::vector<PlaneCopy> takes(int peer, int64_t piece, const Operands& operands, const char* slot,
                               bool streaming) const;
  std::vector<PlaneCopy> keeps(int rank, int64_t piece, const Operands& operands,
                               bool streaming) const;

 private:
  struct Side {
    Side(std::vector<Box> all, int world_size);
    // The range of a piece's boxes, which follow one another: the first box, and one past the last.
    std::pair<const Box*, const Box*> of(int peer, int64_t piece) const;

    std::vector<Box> boxes;
    std::vector<int64_t> bytes;
  };

  Side given_, taken_;
  int64_t pieces_ = 1;
};

}  // namespace symm_cp
