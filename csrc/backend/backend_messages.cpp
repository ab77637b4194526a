// Sends and receives of the backend.
#include "backend/backend.h"
#include "backend/backend_call.h"
#include "backend/backend_tensors.h"
#include "base/error.h"
#include "base/python.h"
#include "messages/messages.h"

namespace symm_cp {

namespace {

MessageBytes message_of(const at::Tensor& tensor, const Extent& extent,
                        const std::shared_ptr<Ending>& owner) {
  const std::string name = CallName("").describe(tensor).str().substr(1);
  return {extent.data, extent.bytes, name, owner};
}

}  // namespace

c10::intrusive_ptr<c10d::Work> Backend::send(std::vector<at::Tensor>& tensors, int destination,
                                             int tag) {
  return translated([&]() -> c10::intrusive_ptr<c10d::Work> {
    const at::Tensor& tensor = single("send", "tensor", tensors);
    Collective collective;
    collective.op = "send";
    collective.begin_event(tensors);
    const Extent extent = bytes_read(collective, tensor);
    collective.outputs = tensors;
    auto ending = std::make_shared<Ending>(std::move(collective), 1);
    Delivery delivery = messages("send").start_send(destination, static_cast<uint32_t>(tag),
                                                    message_of(tensor, extent, ending));
    return c10::make_intrusive<MessageWork>(c10d::OpType::SEND, std::move(delivery),
                                            std::move(ending), wait_limit(), ++sequence_number_);
  });
}

c10::intrusive_ptr<c10d::Work> Backend::receive(const char* op, c10d::OpType type,
                                                const std::vector<at::Tensor>& tensors, int source,
                                                int tag) {
  return translated([&]() -> c10::intrusive_ptr<c10d::Work> {
    const at::Tensor& tensor = single(op, "tensor", tensors);
    Collective collective;
    collective.op = source == kAnySource ? "recvAnySource" : op;
    collective.begin_event(tensors);
    const Extent extent = bytes_written(collective, tensor);
    collective.outputs = tensors;
    auto ending = std::make_shared<Ending>(std::move(collective), 1);
    Delivery delivery = messages(op).start_receive(source, static_cast<uint32_t>(tag),
                                                   message_of(tensor, extent, ending));
    return c10::make_intrusive<MessageWork>(type, std::move(delivery), std::move(ending),
                                            wait_limit(), ++sequence_number_);
  });
}

c10::intrusive_ptr<c10d::Work> Backend::recv(std::vector<at::Tensor>& tensors, int source,
                                             int tag) {
  TORCH_CHECK_VALUE(source >= 0, "recv: source rank ", source, " is negative");
  return receive("recv", c10d::OpType::RECV, tensors, source, tag);
}

c10::intrusive_ptr<c10d::Work> Backend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return receive("recv", c10d::OpType::RECVANYSOURCE, tensors, kAnySource, tag);
}

// --- MessageWork ---------------------------------------------------------------------------------

MessageWork::MessageWork(c10d::OpType type, Delivery delivery, std::shared_ptr<Ending> ending,
                         std::chrono::milliseconds limit, uint64_t sequence_number)
    : BackendWork(type, std::move(ending), sequence_number),
      delivery_(std::move(delivery)),
      limit_(limit) {
  if (ending_->has_work()) connect();
}

void MessageWork::connect() {
  std::call_once(connected_once_, [this] {
    delivery_.when_done(
        [delivery = delivery_, ending = ending_] { ending->exchange_ended(delivery.failure()); });
    connected_ = true;
  });
}

// The thread that carries out messages may wait for Python's lock while it holds its own. So these
// functions release Python's lock before they take that one.

bool MessageWork::isCompleted() {
  const WithoutGil without_gil;
  return connected_ ? ending_->ended() : delivery_.done();
}

bool MessageWork::isSuccess() const {
  const WithoutGil without_gil;
  return delivery_.done() && delivery_.failure().empty();
}

int MessageWork::sourceRank() const {
  const WithoutGil without_gil;
  return delivery_.peer();
}

std::exception_ptr MessageWork::exception() const {
  const WithoutGil without_gil;
  if (!delivery_.done() || delivery_.failure().empty()) return nullptr;
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, __LINE__}, delivery_.failure()));
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  const WithoutGil without_gil;
  return translated([&] {
    try {
      delivery_.wait(timeout == kNoTimeout ? limit_ : timeout);
      if (connected_)
        while (!ending_->await(std::chrono::milliseconds(50))) throw_if_interrupted();
    } catch (const Interrupted&) {
      return false;  // Python raises the exception of the handler when this call has returned
    }
    return true;
  });
}

c10::intrusive_ptr<c10::ivalue::Future> MessageWork::getFuture() {
  const WithoutGil without_gil;
  connect();
  return ending_->future();
}

}  // namespace symm_cp
