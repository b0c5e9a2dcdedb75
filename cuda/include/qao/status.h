// What every function of the C++ API returns. Nothing under cuda/ or csrc/cpu/ throws: csrc turns a failed Status into
// a Python exception that also names the tensors involved.
#pragma once

#include <string>
#include <utility>

namespace qao {

class Status {
 public:
  Status() = default;
  // `remedy`: what the user can do about it; empty if this can only be a defect of qao.
  static Status error(std::string message, std::string remedy = "") {
    Status status;
    status.message_ = std::move(message);
    status.remedy_ = std::move(remedy);
    return status;
  }

  bool ok() const { return message_.empty(); }
  const std::string& message() const { return message_; }
  const std::string& remedy() const { return remedy_; }

 private:
  std::string message_;  // empty: success
  std::string remedy_;
};

}  // namespace qao
