#include "backend/host_links.h"

#include <ATen/ATen.h>

#include <cstring>

#include "base/error.h"
#include "channel/wire.h"

namespace symm_cp {

namespace {

using std::chrono::milliseconds;
using LinkWork = c10::intrusive_ptr<c10d::Work>;

constexpr int kHeadTag = HostLinks::kFirstTag;
constexpr int kBodyTag = HostLinks::kFirstTag + 1;

// The first message of a parcel: its size and, if it is small, all its bytes.
struct Head {
  int64_t bytes;  // of the parcel; -1: the sender has failed, `text` holds the reason
  char text[504];
  char data[3584];

  bool failed() const { return bytes < 0; }
  bool holds(int64_t size) const { return size <= static_cast<int64_t>(sizeof(data)); }
};

at::Tensor tensor_of(void* data, int64_t bytes) { return at::from_blob(data, {bytes}, at::kByte); }

at::Tensor new_head(Head** head) {
  at::Tensor tensor = at::zeros({static_cast<int64_t>(sizeof(Head))}, at::kByte);
  *head = static_cast<Head*>(tensor.data_ptr());
  return tensor;
}

// One call of `HostLinks::exchange`.
class Round {
 public:
  Round(c10d::Backend& transport, FailureNotes& notes, int rank, const std::string& call_name,
        const std::string& failure, milliseconds timeout)
      : transport_(transport),
        notes_(notes),
        rank_(rank),
        call_name_(call_name),
        own_failure_(failure),
        timeout_(timeout) {}

  void send(const Parcel& parcel) {
    Head* head = nullptr;
    at::Tensor block = new_head(&head);
    head->bytes = own_failure_.empty() ? parcel.bytes.bytes : -1;
    const std::string& text = own_failure_.empty() ? call_name_ : own_failure_;
    std::strncpy(head->text, text.c_str(), sizeof(head->text) - 1);
    const bool inside = head->failed() || head->holds(head->bytes);
    if (inside && head->bytes > 0)
      std::memcpy(head->data, parcel.bytes.data, static_cast<size_t>(head->bytes));
    start(parcel.rank, kHeadTag, block, true);
    if (!inside)
      start(parcel.rank, kBodyTag, tensor_of(parcel.bytes.data, parcel.bytes.bytes), true);
  }

  void receive(const Parcel& parcel) {
    Incoming incoming{parcel, nullptr, {}, {}};
    incoming.block = new_head(&incoming.head);
    incoming.work = start(parcel.rank, kHeadTag, incoming.block, false);
    incoming_.push_back(std::move(incoming));
  }

  // Returns when all has been sent and received.
  void finish() {
    for (const Incoming& incoming : incoming_)
      if (await(incoming.work, incoming.parcel.rank)) open(incoming);
    for (const auto& [work, peer] : started_) await(work, peer);
    if (!own_failure_.empty()) throw PeerError(own_failure_);
    if (!failure_.empty()) throw PeerError(failure_);
  }

 private:
  struct Incoming {
    Parcel parcel;
    Head* head;
    at::Tensor block;
    LinkWork work;
  };

  LinkWork start(int peer, int tag, const at::Tensor& tensor, bool sends) {
    std::vector<at::Tensor> tensors{tensor};
    kept_.push_back(tensor);
    try {
      LinkWork work =
          sends ? transport_.send(tensors, peer, tag) : transport_.recv(tensors, peer, tag);
      if (sends) started_.emplace_back(work, peer);
      return work;
    } catch (const std::exception& error) {
      lost(peer, error);
      return {};
    }
  }

  bool await(const LinkWork& work, int peer) {
    try {
      return work && work->wait(timeout_);
    } catch (const std::exception& error) {
      lost(peer, error);
      return false;
    }
  }

  // Receives the bytes after the head in any case: their sender waits for that.
  void open(const Incoming& incoming) {
    const Head& head = *incoming.head;
    const int peer = incoming.parcel.rank;
    const Extent& wanted = incoming.parcel.bytes;
    if (head.failed()) {
      fail(head.text);
      return;
    }
    // After a failure of its own, this rank may not know the parcel's size.
    const bool fits = wanted.bytes == head.bytes;
    if (own_failure_.empty() && (!fits || call_name_ != head.text))
      fail("ranks disagree: rank " + std::to_string(peer) + " calls " + head.text + " and sends " +
           std::to_string(head.bytes) + " bytes, rank " + std::to_string(rank_) + " calls " +
           call_name_ + " and takes " + std::to_string(wanted.bytes));
    if (head.holds(head.bytes)) {
      if (fits && head.bytes > 0)
        std::memcpy(wanted.data, head.data, static_cast<size_t>(head.bytes));
      return;
    }
    at::Tensor body =
        fits ? tensor_of(wanted.data, wanted.bytes) : at::empty({head.bytes}, at::kByte);
    await(start(peer, kBodyTag, body, false), peer);
  }

  void lost(int peer, const std::exception& error) {
    if (!own_failure_.empty() || !failure_.empty()) return;
    const std::string noted = notes_.read(peer);
    std::string text = error.what();
    text.resize(std::min(text.size(), text.find('\n')));
    fail(call_name_ + ": rank " + std::to_string(rank_) + " lost the link to rank " +
         std::to_string(peer) + " on another host" +
         (noted.empty() ? ": " + text : ", whose last call failed: " + noted));
  }

  void fail(std::string failure) {
    if (failure_.empty()) failure_ = std::move(failure);
  }

  c10d::Backend& transport_;
  FailureNotes& notes_;
  int rank_;
  const std::string& call_name_;
  const std::string& own_failure_;
  milliseconds timeout_;
  std::string failure_;
  std::vector<Incoming> incoming_;
  std::vector<std::pair<LinkWork, int>> started_;
  std::vector<at::Tensor> kept_;
};

}  // namespace

void HostLinks::exchange(const std::string& call_name, const std::string& failure,
                         const std::vector<Parcel>& sends, const std::vector<Parcel>& receives,
                         milliseconds timeout) {
  Round round(*transport_, notes_, rank_, call_name, failure, timeout);
  for (const Parcel& parcel : receives) round.receive(parcel);
  for (const Parcel& parcel : sends) round.send(parcel);
  round.finish();
}

}  // namespace symm_cp
