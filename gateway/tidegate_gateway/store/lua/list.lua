-- The newest workflows of some states, in one look at all of them. Nothing is written.
--
-- KEYS: ids by creation, an index for each state.
-- ARGV: 1 how many at most, 2 the prefix of the keys of records, 3 how many bytes at most, the first record aside.
-- Answers: the server's milliseconds, 1 if there are more records, then the records, newest first.

local most = tonumber(ARGV[1]) + 1
local time = redis.call('TIME')
local found = {}

-- An index may hold ids whose records have lapsed, until they are pruned: it is read on until there are enough that have
-- not, or too many have been looked at.
local MOST_LOOKS = 2000
local cut = 0
for _, key in ipairs(KEYS) do
  local from, left = 0, most
  repeat
    local rows = redis.call('ZREVRANGE', key, from, from + most - 1, 'WITHSCORES')
    for i = 1, #rows, 2 do
      if left > 0 and redis.call('EXISTS', ARGV[2] .. rows[i]) == 1 then
        found[#found + 1] = { id = rows[i], created_ms = tonumber(rows[i + 1]) }
        left = left - 1
      end
    end
    from = from + most
    if from >= MOST_LOOKS and left > 0 and #rows > 0 then cut = 1 end
  until left == 0 or #rows == 0 or cut == 1
end

table.sort(found, function(one, other)
  if one.created_ms ~= other.created_ms then return one.created_ms > other.created_ms end
  return one.id > other.id
end)
local answer = { time[1] * 1000 + math.floor(time[2] / 1000), #found >= most and 1 or cut }
local bytes = 0
for i = 1, math.min(most - 1, #found) do
  local record = redis.call('GET', ARGV[2] .. found[i].id)
  bytes = bytes + #record
  if i > 1 and bytes > tonumber(ARGV[3]) then
    answer[2] = 1
    break
  end
  answer[i + 2] = record
end
return answer
