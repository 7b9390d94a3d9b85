// SPDX-License-Identifier: Apache-2.0
// Writes a file beside the one that it replaces, so that nobody reads an incomplete one.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>

namespace flownpu {

// Several threads and processes may write the same file at once. Each writes a file with a random
// name, and the last to finish replaces the others'.
class NewFile {
 public:
  // Opens the file to write; finish() reports failures. `path`: its final place.
  explicit NewFile(const std::filesystem::path& path);
  // Removes what was written, unless finish() succeeded.
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  // Binary; may be positioned.
  std::ofstream& content() { return content_; }
  // Gives the file its name. Returns "", or the reason if that or an earlier step failed.
  std::string finish();

 private:
  std::filesystem::path path_;
  std::filesystem::path unfinished_;
  std::ofstream content_;
  std::string problem_;  // why it could not be opened
};

}  // namespace flownpu
