#include "exchange/boxes.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace symm_cp {

namespace {

Planes in_tensor(const Box& box, const Boxes::Operands& operands) {
  return {operands[box.operand] + box.offset, box.plane_pitch, box.pitch};
}

// Planes side by side, like the heads of a position in most tensors: both ranks then pass through a
// slot's memory in order, and planes do not compete for a few places of the cache.
Planes in_slot(const Box& box, const char* slot) {
  return {const_cast<char*>(slot) + box.in_slot, box.row, box.planes * box.row};
}

int64_t bytes_of(const Box& box) { return box.planes * box.rows * box.row; }

// `ends(box)` returns a box's destination and source.
template <class Ends>
std::vector<PlaneCopy> copies_of(std::pair<const Box*, const Box*> boxes, bool streaming,
                                 Ends ends) {
  std::vector<PlaneCopy> copies;
  for (const Box* box = boxes.first; box != boxes.second; ++box) {
    const auto [to, from] = ends(*box);
    copies.push_back({to, from, box->planes, box->rows, box->row, streaming});
  }
  return copies;
}

}  // namespace

Boxes::Side::Side(std::vector<Box> all, int world_size)
    : boxes(std::move(all)), bytes(world_size, 0) {
  for (const Box& box : boxes) bytes[box.peer] += bytes_of(box);
}

std::pair<const Box*, const Box*> Boxes::Side::of(int peer, int64_t piece) const {
  const auto before = [](const Box& box, const std::pair<int, int64_t>& place) {
    return std::pair<int, int64_t>(box.peer, box.piece) < place;
  };
  const auto begin =
      std::lower_bound(boxes.begin(), boxes.end(), std::pair<int, int64_t>(peer, piece), before);
  const auto end =
      std::lower_bound(begin, boxes.end(), std::pair<int, int64_t>(peer, piece + 1), before);
  return {boxes.data() + (begin - boxes.begin()), boxes.data() + (end - boxes.begin())};
}

Boxes::Boxes(std::vector<Box> given, std::vector<Box> taken, int world_size)
    : given_(std::move(given), world_size), taken_(std::move(taken), world_size) {
  for (const Side* side : {&given_, &taken_})
    for (const Box& box : side->boxes) pieces_ = std::max<int64_t>(pieces_, box.piece + 1);
}

void Boxes::check_room(const std::string& call_name, int64_t room) const {
  for (const Side* side : {&given_, &taken_})
    for (const Box& box : side->boxes)
      if (box.in_slot + bytes_of(box) > room)
        throw std::invalid_argument(call_name + ": a box ends at byte " +
                                    std::to_string(box.in_slot + bytes_of(box)) +
                                    " of a part of the slot of " + std::to_string(room));
}

std::vector<PlaneCopy> Boxes::gives(int peer, int64_t piece, const Operands& operands, char* slot,
                                    bool streaming) const {
  return copies_of(given_.of(peer, piece), streaming, [&](const Box& box) {
    return std::pair{in_slot(box, slot), in_tensor(box, operands)};
  });
}

std::vector<PlaneCopy> Boxes::takes(int peer, int64_t piece, const Operands& operands,
                                    const char* slot, bool streaming) const {
  return copies_of(taken_.of(peer, piece), streaming, [&](const Box& box) {
    return std::pair{in_tensor(box, operands), in_slot(box, slot)};
  });
}

std::vector<PlaneCopy> Boxes::keeps(int rank, int64_t piece, const Operands& operands,
                                    bool streaming) const {
  const Box* to = taken_.of(rank, piece).first;
  return copies_of(given_.of(rank, piece), streaming, [&](const Box& box) {
    return std::pair{in_tensor(*to++, operands), in_tensor(box, operands)};
  });
}

}  // namespace symm_cp
