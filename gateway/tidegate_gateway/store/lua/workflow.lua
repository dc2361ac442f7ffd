-- One atomic change to one workflow. Nothing of it is written before everything has been checked.
--
-- KEYS: 1 the prefix of the pool's keys, under which are
--       `workflow:ID` the record; `running`, `done`, `cancelled`, `expired` ids by state (running ones by the end of their
--       grace, others by their end), and `created:STATE` the same ids by creation; each also with `:TENANT` behind it;
--       `members:ID` the calls that run: call -> stage, newline, gateway, and for one with an Idempotency-Key newline, key;
--       `answered:ID` the calls that ended well and may be repeated: stage, newline, key;
--       `forgotten:ID` the calls of gateways that seemed dead, as in `members`: they run no more, but a good end counts;
--       `answers:ID` the requests that had an Idempotency-Key: hash of the key -> print of the body, and the answer;
--       `calls:GATEWAY` ids of workflows in which a gateway has calls; `ends` those that no gateway has counted yet:
--       [template, outcome]; `sizes` id -> its bytes (`parse_size`); `totals` the sums of these, of all and of each tenant;
--       2 the id of the workflow that an earlier creation with this Idempotency-Key made.
-- ARGV: 1 the operation, 2 its arguments as JSON; `by` is the tenant that the request names, if it names one.
-- Answers JSON: the record with `now_ms`, or {"error": code, ...}.
--
-- The record is one JSON document; calls are beside it, so that its size does not depend on how many run.
-- `after` is a string of names separated by newlines, because an empty Lua table would come back as an object. All
-- instants are this server's milliseconds: clocks of gateways play no part.

local args = cjson.decode(ARGV[2])
local once = KEYS[2]

local function key(kind, id) return KEYS[1] .. kind .. ':' .. id end

local record, answered, forgotten = key('workflow', args.id), key('answered', args.id), key('forgotten', args.id)
local calls, mine, ends = key('members', args.id), key('calls', args.gateway), KEYS[1] .. 'ends'
local sizes, totals = KEYS[1] .. 'sizes', KEYS[1] .. 'totals'
local longest_ms = 8 * 24 * 3600 * 1000 -- the longest deadline, and a day
local OVERHEAD = 768 -- bytes of a workflow's keys and entries in the indexes
local OVERHEAD_OF_KEY = 256 -- bytes of the entries for one Idempotency-Key
local MOST_REMOVED = 128 -- workflows that one request removes; as many small ones have the bytes of the largest new one
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function fail(code, more)
  more = more or {}
  more.error = code
  return cjson.encode(more)
end

-- What an entry of `sizes` says: the bytes of the record and of its entries in the indexes, the bytes that are kept for
-- Idempotency-Keys, the key of the creation, the tenant.
local function parse_size(id)
  local bytes, kept, creation, tenant = string.match(redis.call('HGET', sizes, id) or '0 0 - ', '^(%d+) (%d+) (%S+) (.*)$')
  return tonumber(bytes), tonumber(kept), creation, tenant
end

local function add_to_totals(tenant, bytes)
  redis.call('HINCRBY', totals, 'bytes', bytes)
  if redis.call('HINCRBY', totals, 'bytes:' .. tenant, bytes) <= 0 then redis.call('HDEL', totals, 'bytes:' .. tenant) end
end

-- Counts the bytes of a workflow; `kept` more are kept for keys, among them that of the creation if `creation` is given.
local function charge(doc, text, kept, creation)
  local bytes, kept_before, creation_before = parse_size(doc.id)
  local now = text and math.ceil(#text / 256) * 256 + OVERHEAD or bytes
  if now == bytes and kept == 0 then return end
  local entry = { now, kept_before + kept, creation or creation_before, doc.tenant }
  redis.call('HSET', sizes, doc.id, table.concat(entry, ' '))
  add_to_totals(doc.tenant, now - bytes + kept)
end

local function uncharge(id)
  local bytes, kept, _, tenant = parse_size(id)
  if redis.call('HDEL', sizes, id) == 1 then add_to_totals(tenant, -bytes - kept) end
end

local by_name = {} -- the stages of a document; a document may name three thousand in its `after` lists

local function find(doc, name)
  local known = by_name[doc]
  if not known or not known[name] then
    known = {}
    for _, stage in ipairs(doc.stages) do known[stage.name] = known[stage.name] or stage end
    by_name[doc] = known
  end
  return known[name]
end

-- The outcome of a workflow that is done is met or late; of others it is their state, or `failed`.
local function finish(doc, state, outcome, ended_ms)
  doc.state, doc.ended_ms, doc.owners = state, ended_ms or now_ms, {}
  if state == 'done' then outcome = doc.ended_ms > doc.deadline_ms and 'late' or 'met' end
  doc.outcome = outcome or state
  for _, stage in ipairs(doc.stages) do
    if stage.running > 0 then stage.ended_ms = doc.ended_ms end
    stage.running = 0
    stage.over = stage.over or (state == 'done' and stage.started)
  end
end

local function settle(doc)
  if doc.state ~= 'running' or not doc.declared then return end
  for _, stage in ipairs(doc.stages) do
    if not stage.over then return end
  end
  finish(doc, 'done')
end

-- A stage is over when its declared calls are done. Without their number one call is the stage, unless more of them
-- ran at the same time. Then, and in an undeclared workflow, only a later stage or the client can end the stage.
local function settle_stage(doc, stage)
  if stage.expected > 0 then
    stage.over = stage.over or stage.done >= stage.expected
  elseif doc.declared then
    stage.over = stage.over or (stage.done == 1 and stage.running == 0)
  end
end

-- In an undeclared workflow a later stage ends a stage only until its next call, because agents loop.
local function over_for_good(doc, stage)
  return stage.over and (doc.declared or stage.completed)
end

-- Takes a call out of its stage, or out of the forgotten ones; nil if it is in neither (any more), else its entry.
-- However many calls with one Idempotency-Key end well, they count once.
local function release(doc, id, ok)
  if doc.state ~= 'running' then return nil end
  local runs = redis.call('HGET', calls, id)
  local call = runs or redis.call('HGET', forgotten, id)
  if not call then return nil end
  local name, gateway, call_key = string.match(call, '^([^\n]*)\n([^\n]*)\n?(.*)$')
  local stage = find(doc, name)
  redis.call('HDEL', runs and calls or forgotten, id)
  if runs then
    doc.owners[gateway] = doc.owners[gateway] > 1 and doc.owners[gateway] - 1 or nil
    stage.running = stage.running - 1
  end
  stage.failing, stage.ended_ms = not ok, now_ms
  if ok then doc.answered_ms = now_ms end
  if ok and (call_key == '' or redis.call('SADD', answered, name .. '\n' .. call_key) == 1) then
    stage.done = stage.done + 1
    if call_key ~= '' then charge(doc, nil, #name + #call_key + OVERHEAD_OF_KEY) end
  end
  settle_stage(doc, stage)
  return call
end

local function close_before(doc, stage)
  for name in string.gmatch(stage.after, '[^\n]+') do
    local earlier = find(doc, name)
    if earlier and not earlier.over then
      earlier.over = true
      close_before(doc, earlier)
    end
  end
end

-- Ends a workflow whose time is over. Nobody said what an undeclared workflow still lacks, so it is done if all its calls were
-- answered, at the instant of the last answer.
local function pass(doc)
  local busy, failing = false, false
  for _, stage in ipairs(doc.stages) do
    busy, failing = busy or stage.running > 0, failing or stage.failing
  end
  if doc.answered_ms and not (doc.declared or busy or failing) then
    finish(doc, 'done', nil, doc.answered_ms)
  else
    finish(doc, 'expired', failing and not busy and 'failed' or nil, doc.deadline_ms + args.grace_ms)
  end
end

-- The record, and whether its time was over just now; or nil, and whether it is another tenant's.
local function load()
  local raw = redis.call('GET', record)
  if not raw then return nil, false end
  local doc = cjson.decode(raw)
  if args.by and args.by ~= doc.tenant then return nil, true end
  local late = doc.state == 'running' and now_ms > doc.deadline_ms + args.grace_ms
  if late then pass(doc) end
  return doc, late
end

-- The indexes of a state, all workflows' and its tenant's: each by its instant, and by creation.
local function both(state, tenant)
  local everyones = { KEYS[1] .. state, key('created', state) }
  return { everyones, { everyones[1] .. ':' .. tenant, everyones[2] .. ':' .. tenant } }
end

-- Workflows whose records have lapsed leave the indexes of a state, two hundred at a time.
local function prune(state, names)
  local lapsed = redis.call('ZRANGEBYSCORE', names[1], '-inf', now_ms - args.retention_ms, 'LIMIT', 0, 200)
  for _, id in ipairs(lapsed) do
    local _, _, _, tenant = parse_size(id)
    for _, each in ipairs(both(state, tenant)[2]) do redis.call('ZREM', each, id) end
    uncharge(id)
  end
  for _, name in ipairs(names) do
    if #lapsed > 0 then redis.call('ZREM', name, unpack(lapsed)) end
  end
end

-- Puts a workflow into the indexes of its state.
local function list(doc, instant_ms)
  for _, names in ipairs(both(doc.state, doc.tenant)) do
    redis.call('ZADD', names[1], instant_ms, doc.id)
    redis.call('ZADD', names[2], doc.created_ms, doc.id)
    prune(doc.state, names)
    for _, name in ipairs(names) do redis.call('PEXPIRE', name, longest_ms) end
  end
  for _, name in ipairs({ sizes, totals }) do redis.call('PEXPIRE', name, longest_ms) end
end

local function unlist(state, tenant, id)
  for _, names in ipairs(both(state, tenant)) do
    for _, name in ipairs(names) do redis.call('ZREM', name, id) end
  end
end

-- Removes the workflow that ended first, of a tenant (':TENANT') or of all (''); false if none has ended.
local function remove_oldest(whose)
  local oldest, state, ended_ms
  for _, each in ipairs({ 'done', 'cancelled', 'expired' }) do
    local first = redis.call('ZRANGE', KEYS[1] .. each .. whose, 0, 0, 'WITHSCORES')
    if first[1] and not (ended_ms and ended_ms <= tonumber(first[2])) then
      oldest, state, ended_ms = first[1], each, tonumber(first[2])
    end
  end
  if not oldest then return false end
  local _, _, creation, tenant = parse_size(oldest)
  if tenant == '' then tenant = string.sub(whose, 2) end -- an entry whose record has lapsed
  redis.call('UNLINK', key('workflow', oldest), key('answered', oldest), key('answers', oldest), key('creation', creation))
  unlist(state, tenant, oldest)
  uncharge(oldest)
  return true
end

-- The bound that a tenant has reached: 'tenant-limit', 'saturated' or nil. Of its bound it has the part that is free of the
-- store (the dynamic threshold of Choudhury and Hahne, 1998): tenants that take what they can, together or one after the
-- other, leave room for others. The store is the reason once half of it is taken.
local function reached(tenant)
  local own, all = unpack(redis.call('HMGET', totals, 'bytes:' .. tenant, 'bytes'))
  local free = math.max(args.most_bytes - tonumber(all or 0), 0)
  if tonumber(own or 0) < math.min(args.most_tenant_bytes, args.most_bytes) * free / args.most_bytes then return nil end
  return 2 * free < args.most_bytes and 'saturated' or 'tenant-limit'
end

-- The bound that leaves no room for more of a tenant, or nil. Workflows that have ended make room before their retention is
-- over, the oldest first: those of the tenant, and if the store is full, then those of others.
local function full(tenant)
  for left = MOST_REMOVED, 0, -1 do
    local code = reached(tenant)
    if not code or left == 0 then return code end
    if not remove_oldest(':' .. tenant) and not (code == 'saturated' and remove_oldest('')) then return code end
  end
end

-- The only place that writes a state, and so the one that counts ends.
local function save(doc, before)
  local ttl_ms = args.retention_ms
  if doc.state == 'running' then
    ttl_ms = ttl_ms + math.max(doc.deadline_ms - now_ms, 0) + args.grace_ms
    if not before then
      for _, ended in ipairs({ 'done', 'cancelled', 'expired' }) do unlist(ended, doc.tenant, doc.id) end -- of an earlier life
      uncharge(doc.id)
      list(doc, doc.deadline_ms + args.grace_ms)
    end
    redis.call('PEXPIRE', calls, ttl_ms)
    redis.call('PEXPIRE', forgotten, ttl_ms)
  elseif before ~= doc.state then
    redis.call('DEL', calls, forgotten)
    unlist('running', doc.tenant, doc.id)
    list(doc, now_ms)
    redis.call('RPUSH', ends, cjson.encode({ doc.template, doc.outcome }))
    redis.call('LTRIM', ends, -100000, -1)
    redis.call('PEXPIRE', ends, args.retention_ms)
  end
  redis.call('PEXPIRE', answered, ttl_ms)
  redis.call('PEXPIRE', key('answers', doc.id), ttl_ms)
  local text = cjson.encode(doc)
  redis.call('SET', record, text, 'PX', ttl_ms)
  charge(doc, text, 0)
end

-- The record of a running workflow; else nil, the rejection, and the record if there is one.
local function open()
  local doc, late = load()
  if not doc then return nil, fail('workflow_not_found') end
  if late then save(doc, 'running') end
  if doc.state ~= 'running' then return nil, fail('workflow_ended', { state = doc.state }), doc end
  return doc
end

local function answer(doc)
  doc.now_ms = now_ms
  return cjson.encode(doc)
end

-- The answer to a request that has changed the workflow. It is kept for the request's key, if it has one of the client's
-- and there is room; a command of the gateway itself that arrives twice gets the record as it is.
local function answer_change(doc)
  local text = answer(doc)
  if not args.key then return text end
  local ttl_ms = redis.call('PTTL', record)
  local kept = cjson.encode({ print = args.print, answer = args.repeatable and not reached(doc.tenant) and text or nil })
  redis.call('HSET', key('answers', doc.id), args.key, kept)
  redis.call('PEXPIRE', key('answers', doc.id), ttl_ms)
  local creates = ARGV[1] == 'create'
  if creates then redis.call('SET', once, doc.id, 'PX', ttl_ms) end
  charge(doc, nil, #kept + OVERHEAD_OF_KEY, creates and args.key or nil)
  return text
end

local function create(stages, declared)
  local doc = {
    id = args.id, state = 'running', template = args.template, tenant = args.tenant, declared = declared,
    created_ms = now_ms, deadline_ms = now_ms + args.deadline_ms, stages = {}, owners = {},
  }
  for i, stage in ipairs(stages) do
    doc.stages[i] = { name = stage.name, after = stage.after, expected = stage.expected, passes = stage.passes,
                      parallel = stage.parallel, started = false, running = 0, done = 0, over = false }
  end
  return doc
end

-- An undeclared stage comes after the stages that have begun and have no call running now. Its `after` names those of them
-- that no stage comes after yet, so each stage is named once, and the record stays small.
local function extend(doc, name)
  local before, covered = {}, {}
  for _, stage in ipairs(doc.stages) do
    if stage.started then
      for earlier in string.gmatch(stage.after, '[^\n]+') do covered[earlier] = true end
    end
  end
  for _, stage in ipairs(doc.stages) do
    if stage.started and stage.running == 0 then
      if not covered[stage.name] then before[#before + 1] = stage.name end
      stage.over = stage.over or not stage.declared
    end
  end
  local stage = { name = name, after = table.concat(before, '\n'), expected = 0, passes = 1, parallel = 0,
                  started = false, running = 0, done = 0, over = false }
  doc.stages[#doc.stages + 1] = stage
  return stage
end

-- The most bytes that the record can have with one more stage, once all stages are over. A later stage may name each of
-- them once more.
local function grown_bytes(doc)
  local bytes = args.record_bytes + args.stage_bytes + 2 * #args.stage + 2
  for _, stage in ipairs(doc.stages) do bytes = bytes + args.stage_bytes + 2 * #stage.name + 2 + #stage.after end
  return bytes
end

local operations = {}

function operations.create()
  if redis.call('EXISTS', record) == 1 then return fail('workflow_exists') end
  local no_room = full(args.tenant)
  if no_room then return fail(no_room) end
  local doc = create(args.stages, #args.stages > 0)
  for _, stage in ipairs(doc.stages) do stage.declared = true end
  save(doc)
  return answer_change(doc)
end

function operations.join()
  local doc, late = load()
  local known = doc ~= nil
  if not known then
    local foreign = late
    if foreign or not args.deadline_ms then return fail('workflow_not_found') end
    doc = create({}, false)
  end
  if late then save(doc, 'running') end
  -- A call whose answer may have been lost: it is answered again, and the record does not change.
  local again = args.call_key and redis.call('SISMEMBER', answered, args.stage .. '\n' .. args.call_key) == 1
  if again and (doc.state == 'running' or doc.state == 'done') then return answer(doc) end
  if doc.state ~= 'running' then return fail('workflow_ended', { state = doc.state }) end
  local stage = find(doc, args.stage)
  if stage and over_for_good(doc, stage) then return fail('stage_already_done') end
  if not stage and (#doc.stages >= args.most_stages or grown_bytes(doc) > args.most_record_bytes) then
    return fail('too_many_stages')
  end
  if redis.call('HLEN', calls) >= args.most_calls then return fail('too_many_calls') end
  local grows = not (known and stage and not args.call_key) and redis.call('HEXISTS', calls, args.call) == 0
  local no_room = grows and full(doc.tenant)
  if no_room then return fail(no_room) end
  stage = stage or extend(doc, args.stage)
  stage.started, stage.over, stage.started_ms = true, false, stage.started_ms or now_ms
  close_before(doc, stage)
  local key = args.call_key and '\n' .. args.call_key or ''
  if redis.call('HSETNX', calls, args.call, stage.name .. '\n' .. args.gateway .. key) == 1 then
    stage.running = stage.running + 1
    doc.owners[args.gateway] = (doc.owners[args.gateway] or 0) + 1
  end
  redis.call('HDEL', forgotten, args.call)
  save(doc, known and 'running' or nil)
  redis.call('SADD', mine, doc.id)
  redis.call('PEXPIRE', mine, longest_ms)
  return answer(doc)
end

-- The end of a call; a second report of the same call finds it gone and changes nothing.
function operations.finish()
  local doc, late = load()
  if not doc then
    redis.call('SREM', mine, args.id)
    return fail('workflow_not_found')
  end
  local released = release(doc, args.call, args.ok)
  if released and args.share_ms then
    local stage = find(doc, string.match(released, '^([^\n]*)'))
    stage.share_ms = stage.share_ms or args.share_ms
  end
  if released then settle(doc) end
  if released or late then save(doc, 'running') end
  if not doc.owners[args.gateway] then redis.call('SREM', mine, doc.id) end
  return answer(doc)
end

-- Some calls of a gateway that seems dead. If it lives after all (it slept, or was cut off), their ends will still come.
function operations.forget()
  local doc, late = load()
  local touched, left = late, 500
  if doc and doc.owners[args.gateway] then
    local all, room = redis.call('HGETALL', calls), args.most_calls - redis.call('HLEN', forgotten)
    for i = 1, #all, 2 do
      if left > 0 and string.match(all[i + 1], '\n([^\n]*)') == args.gateway then
        local call = release(doc, all[i], false)
        touched, left = touched or call, left - 1
        if call and room > 0 then room = room - redis.call('HSET', forgotten, all[i], call) end
      end
    end
    settle(doc)
  end
  if not doc or left > 0 or not doc.owners[args.gateway] then redis.call('SREM', mine, args.id) end
  if not doc then return fail('workflow_not_found') end
  if touched then save(doc, 'running') end
  return answer(doc)
end

-- The indexes of all states, without a workflow: nothing else may happen for hours after a burst.
function operations.prune()
  for _, state in ipairs({ 'running', 'done', 'cancelled', 'expired' }) do prune(state, both(state, '')[1]) end
  return '{}'
end

function operations.complete_stage()
  local doc, rejection = open()
  if not doc then return rejection end
  local stage = find(doc, args.stage)
  if not stage then return fail('stage_not_found') end
  if over_for_good(doc, stage) then return fail('stage_already_done') end
  stage.started, stage.started_ms, stage.ended_ms = true, stage.started_ms or now_ms, now_ms
  close_before(doc, stage)
  stage.over, stage.completed, stage.failing = true, true, false
  settle(doc)
  save(doc, 'running')
  return answer_change(doc)
end

function operations.complete()
  local doc, rejection, past = open()
  if past and past.state == 'done' then return answer(past) end
  if not doc then return rejection end
  for _, stage in ipairs(doc.stages) do stage.over = true end
  finish(doc, 'done')
  save(doc, 'running')
  return answer_change(doc)
end

function operations.cancel()
  local doc, rejection, past = open()
  if past and past.state == 'cancelled' then return answer(past) end
  if not doc then return rejection end
  finish(doc, 'cancelled')
  save(doc, 'running')
  return answer(doc)
end

-- Also ends it if its grace is over.
function operations.get()
  local doc, late = load()
  if not doc then
    local foreign = late
    if not foreign then
      local _, _, _, tenant = parse_size(args.id)
      unlist('running', tenant, args.id)
      uncharge(args.id)
    end
    return fail('workflow_not_found')
  end
  if late then save(doc, 'running') end
  return answer(doc)
end

-- A request with the key of an earlier one.
if args.key then
  local id = redis.call('GET', once) or args.id
  local kept = redis.call('HGET', key('answers', id), args.key)
  if kept then
    kept = cjson.decode(kept)
    if kept.print ~= args.print then return fail('idempotency_key_reused') end
    if kept.answer then return kept.answer end
    record = key('workflow', id)
    local doc = load()
    return doc and answer(doc) or fail('workflow_not_found')
  end
end
return operations[ARGV[1]]()
