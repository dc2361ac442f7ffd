-- One atomic change to relQueries. Nothing is written before everything has been checked.
--
-- KEYS: 1 the prefix of all keys of relQueries; 2 the stored answer for an Idempotency-Key.
--       Under the prefix: `record:ID` (hash), `rows:ID` (list of JSON, by number of the row), `done:ID` (bitmap of finished rows),
--       `results:ID` (list of JSON, in the order of their ends), `leases` (running ids by the end of their lease), `removals`
--       (all ids by the instant of their removal), `totals` (bytes and running relQueries, of all and of each tenant).
-- ARGV: 1 the operation, 2 its arguments as JSON; `by` is the tenant that the request names, if it names one; 3 a result, or
--       the spec of a new relQuery. The spec may be large, so it is read by `spec` alone.
-- Answers JSON or a list; an error is {"error": code}.
--
-- The rows are pushed before `create`, under an id of the gateway's own choice, and lapse if `create` does not follow.

local prefix, once = KEYS[1], KEYS[2]
local leases, removals, totals = prefix .. 'leases', prefix .. 'removals', prefix .. 'totals'
local args = cjson.decode(ARGV[2])
local longest_ms = 9 * 24 * 3600 * 1000 -- the longest deadline, a day of retention, and a day
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local FIELDS = { 'id', 'tenant', 'status', 'model', 'total', 'completed', 'failed', 'created_ms', 'expires_ms', 'ended_ms',
  'bytes', 'rows_bytes', 'owner' } -- all but the spec and the upload
local NUMBERS = { 'total', 'completed', 'failed', 'created_ms', 'expires_ms', 'ended_ms', 'bytes', 'rows_bytes' }

local LOOKED = 1000 -- relQueries that wait for a gateway, of which one that has room looks at
local PIECE = 8 -- items of a list that are read at once: a result may have 1 MiB

local function key(kind, id) return prefix .. kind .. ':' .. id end

local function fail(code, text)
  return cjson.encode({ error = code, text = text })
end

local function charge(doc, bytes)
  doc.bytes = doc.bytes + bytes
  redis.call('HINCRBY', key('record', doc.id), 'bytes', bytes)
  redis.call('HINCRBY', totals, 'bytes', bytes)
  redis.call('HINCRBY', totals, 'bytes:' .. doc.tenant, bytes)
end

-- The relQuery ends: its rows are removed, its results stay for the retention.
local function finish(doc, status, ended_ms)
  doc.status, doc.ended_ms, doc.owner = status, ended_ms or now_ms, ''
  redis.call('HSET', key('record', doc.id), 'status', status, 'ended_ms', doc.ended_ms, 'owner', '')
  redis.call('ZREM', leases, doc.id)
  redis.call('ZADD', removals, now_ms + args.retention_ms, doc.id)
  redis.call('HINCRBY', totals, 'running:' .. doc.tenant, -1)
  redis.call('UNLINK', key('rows', doc.id), key('done', doc.id))
  charge(doc, -doc.rows_bytes)
end

-- The record, ended if its time is over; nil if it is unknown or another tenant's.
local function load(id)
  local values = redis.call('HMGET', key('record', id), unpack(FIELDS))
  if not values[1] then return nil end
  local doc = {}
  for i, name in ipairs(FIELDS) do doc[name] = values[i] or nil end
  for _, name in ipairs(NUMBERS) do doc[name] = tonumber(doc[name]) end
  if args.by and args.by ~= doc.tenant then return nil end
  if doc.status == 'in_progress' and now_ms > doc.expires_ms then finish(doc, 'expired', doc.expires_ms) end
  return doc
end

local function shown(doc)
  doc.now_ms = now_ms
  return cjson.encode(doc)
end

-- Whether a tenant with `own` running relQueries may have a further one of a gateway's places. It may have the part of its
-- bound that is free of the places, and always one.
local function has_room(own, free, places)
  return free > 0 and own < math.max(math.min(args.most_running, places) * free / places, 1)
end

local function keep()
  for _, each in ipairs({ leases, removals, totals }) do redis.call('PEXPIRE', each, longest_ms) end
end

local function remove(id)
  local doc = load(id)
  if doc then
    if doc.status == 'in_progress' then finish(doc, 'expired') end
    charge(doc, -doc.bytes)
    for _, name in ipairs({ 'bytes:', 'running:' }) do
      if tonumber(redis.call('HGET', totals, name .. doc.tenant) or 0) <= 0 then redis.call('HDEL', totals, name .. doc.tenant) end
    end
  end
  redis.call('UNLINK', key('record', id), key('rows', id), key('done', id), key('results', id))
  redis.call('ZREM', removals, id)
  redis.call('ZREM', leases, id)
end

local function remove_lapsed()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', removals, '-inf', now_ms, 'LIMIT', 0, 100)) do remove(id) end
end

local operations = {}

function operations.create()
  remove_lapsed()
  if once ~= '' then
    local stored = redis.call('GET', once)
    if stored then
      stored = cjson.decode(stored)
      if stored.digest ~= args.digest then return fail('idempotency_key_reused') end
      local doc = load(stored.id)
      if doc then return shown(doc) end
    end
  end
  if args.repeats then return fail('relquery_not_repeated') end
  local known = load(args.id)
  -- A connection that broke after the creation makes its client create the relQuery again.
  if known and redis.call('HGET', key('record', args.id), 'upload') == args.upload then return shown(known) end
  if known or redis.call('EXISTS', key('record', args.id)) == 1 then return fail('relquery_exists') end
  local function total(name) return tonumber(redis.call('HGET', totals, name) or 0) end
  if total('running:' .. args.tenant) >= args.most_running then return fail('tenant-limit', 'running') end
  local own = total('bytes:' .. args.tenant) + args.rows_bytes
  local free = math.max(args.most_bytes - total('bytes'), 0)
  if own > math.min(args.most_tenant_bytes, args.most_bytes) * free / args.most_bytes then -- as in `workflow.lua`
    return fail(2 * free < args.most_bytes and 'saturated' or 'tenant-limit', 'bytes')
  end
  local kept_ms = args.lasts_ms + args.retention_ms + 3600 * 1000
  -- A connection that broke after a push makes its client push the same rows again.
  if redis.call('LLEN', key('rows', args.upload)) ~= args.total then return fail('rows_lapsed') end
  redis.call('RENAME', key('rows', args.upload), key('rows', args.id))
  redis.call('PEXPIRE', key('rows', args.id), kept_ms)
  local owned = has_room(args.own, args.free, args.places)
  redis.call('HSET', key('record', args.id), 'id', args.id, 'tenant', args.tenant, 'status', 'in_progress',
    'spec', ARGV[3], 'model', args.model, 'total', args.total, 'completed', 0, 'failed', 0, 'created_ms', now_ms,
    'expires_ms', now_ms + args.lasts_ms, 'bytes', 0, 'rows_bytes', args.rows_bytes, 'owner', owned and args.gateway or '',
    'upload', args.upload)
  -- The record tells what `remove` takes off the totals, so it outlives them, also where no gateway runs for days.
  redis.call('PEXPIRE', key('record', args.id), 2 * longest_ms)
  redis.call('ZADD', leases, owned and now_ms + args.lease_ms or 0, args.id)
  redis.call('ZADD', removals, now_ms + args.lasts_ms + args.retention_ms, args.id)
  redis.call('HINCRBY', totals, 'running:' .. args.tenant, 1)
  keep()
  local doc = load(args.id)
  charge(doc, args.rows_bytes)
  if once ~= '' then
    redis.call('SET', once, cjson.encode({ digest = args.digest, id = args.id }), 'PX', kept_ms)
  end
  return shown(doc)
end

function operations.get()
  local doc = load(args.id)
  return doc and shown(doc) or fail('relquery_not_found')
end

function operations.cancel()
  local doc = load(args.id)
  if not doc then return fail('relquery_not_found') end
  if doc.status == 'in_progress' then finish(doc, 'cancelled') end
  return shown(doc)
end

-- The end of a row. The first result of a row counts, whichever gateway brings it.
function operations.finish()
  local doc = load(args.id)
  if not doc then return fail('relquery_not_found') end
  if doc.status == 'in_progress' and redis.call('SETBIT', key('done', doc.id), args.row, 1) == 0 then
    local count = args.ok and 'completed' or 'failed'
    doc[count] = redis.call('HINCRBY', key('record', doc.id), count, 1)
    local results = redis.call('RPUSH', key('results', doc.id), ARGV[3])
    if results == 1 then
      local kept_ms = redis.call('PTTL', key('rows', doc.id))
      redis.call('PEXPIRE', key('results', doc.id), kept_ms)
      redis.call('PEXPIRE', key('done', doc.id), kept_ms)
    end
    charge(doc, #ARGV[3])
    if doc.completed + doc.failed >= doc.total then
      finish(doc, 'completed')
    elseif doc.bytes - doc.rows_bytes > args.most_result_bytes then
      finish(doc, 'failed')
    end
  end
  return shown(doc)
end

-- Appends the items of a list after the first `args.after`: at most `args.most`, up to `args.most_bytes`, but at least one.
local function append_page(answer, list)
  local count, bytes, first = 0, 0, args.after
  while count < args.most do
    local found = redis.call('LRANGE', list, first, first + PIECE - 1)
    for _, item in ipairs(found) do
      bytes = bytes + #item
      if count > 0 and (bytes > args.most_bytes or count >= args.most) then return answer end
      count = count + 1
      answer[#answer + 1] = item
    end
    if #found < PIECE then break end
    first = first + PIECE
  end
  return answer
end

-- The record, then a page of results.
function operations.results()
  local doc = load(args.id)
  if not doc then return { fail('relquery_not_found') } end
  return append_page({ shown(doc) }, key('results', doc.id))
end

function operations.rows()
  return append_page({}, key('rows', args.id))
end

function operations.spec()
  return redis.call('HGET', key('record', args.id), 'spec')
end

-- Renews the leases of the caller's relQueries and takes over some whose leases have lapsed, at most `args.most`.
function operations.hold()
  remove_lapsed()
  keep()
  local lost, taken, running = {}, {}, {}
  for _, id in ipairs(args.held) do
    local doc = load(id)
    if doc and doc.status == 'in_progress' and doc.owner == args.gateway then
      redis.call('ZADD', leases, now_ms + args.lease_ms, id)
      running[doc.tenant] = (running[doc.tenant] or 0) + 1
    else
      lost[#lost + 1] = id
    end
  end
  local free, places = args.most, args.most + #args.held
  local lapsed = free > 0 and redis.call('ZRANGEBYSCORE', leases, '-inf', now_ms, 'LIMIT', 0, LOOKED) or {}
  for _, id in ipairs(lapsed) do
    if free == 0 then break end
    local tenant = redis.call('HGET', key('record', id), 'tenant')
    local own = tenant and running[tenant] or 0
    local doc = has_room(own, free, places) and load(id)
    if not tenant then
      redis.call('ZREM', leases, id)
    elseif doc and doc.status == 'in_progress' then
      running[tenant], free = own + 1, free - 1
      doc.owner = args.gateway
      redis.call('HSET', key('record', id), 'owner', args.gateway)
      redis.call('ZADD', leases, now_ms + args.lease_ms, id)
      taken[#taken + 1] = shown(doc)
    end
  end
  return cjson.encode({ lost = lost, taken = taken })
end

function operations.release()
  for _, id in ipairs(args.held) do
    local doc = load(id)
    if doc and doc.status == 'in_progress' and doc.owner == args.gateway then
      redis.call('HSET', key('record', id), 'owner', '')
      redis.call('ZADD', leases, 0, id)
    end
  end
  return '{}'
end

return operations[ARGV[1]]()
