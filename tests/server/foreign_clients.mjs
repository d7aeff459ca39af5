// Client libraries of JavaScript, each tried: node foreign_clients.mjs NAME URL, in a folder with its packages.
// Run by tests/server/test_foreign_clients.py.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import path from "node:path";

const [name, url] = process.argv.slice(2);
const { resolve } = createRequire(path.join(process.cwd(), "package.json"));
const library = (package_) => import(pathToFileURL(resolve(package_)).href);

const messages = [{ role: "user", content: "Tell me about the sea." }];
const prompt = messages[0].content;
const cities = ["Paris", "Oslo"];
const closed = (properties) => ({
  type: "object", additionalProperties: false, required: Object.keys(properties), properties,
});
const trip = { ...closed({ to: { $ref: "#/$defs/City" } }), $defs: { City: closed({ name: { enum: cities } }) } };

async function joined(texts) {
  let whole = "";
  for await (const text of texts) whole += text;
  return whole;
}

const clients = {
  // A stream, a forced call, a schema, and a streamed response.
  async openai() {
    const { OpenAI } = await library("openai");
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
    const asked = { model: "demo", messages, temperature: 0, max_tokens: 400 };
    const stream = client.chat.completions.stream({ ...asked, max_tokens: 8 });
    assert((await stream.finalChatCompletion()).choices[0].message.content);
    const tools = [{ type: "function", function: { name: "travel", parameters: trip, strict: true } }];
    const forced = { type: "function", function: { name: "travel" } };
    const call = await client.chat.completions.create({ ...asked, tools, tool_choice: forced });
    assert.equal(call.choices[0].message.tool_calls.length, 1);
    assert(cities.includes(JSON.parse(call.choices[0].message.tool_calls[0].function.arguments).to.name));
    const format = { type: "json_schema", json_schema: { name: "trip", strict: true, schema: trip } };
    const held = await client.chat.completions.create({ ...asked, response_format: format });
    assert(cities.includes(JSON.parse(held.choices[0].message.content).to.name));
    const events = client.responses.stream({ model: "demo", input: prompt, max_output_tokens: 16 });
    assert((await events.finalResponse()).output_text);
  },

  // A stream and a forced call.
  async "@anthropic-ai/sdk"() {
    const { Anthropic } = await library("@anthropic-ai/sdk");
    const client = new Anthropic({ baseURL: url, apiKey: "none" });
    const asked = { model: "demo", messages };
    assert(await client.messages.stream({ ...asked, max_tokens: 8 }).finalText());
    const tools = [{ name: "travel", input_schema: trip }];
    const tool_choice = { type: "tool", name: "travel" };
    const call = await client.messages.create({ ...asked, max_tokens: 400, temperature: 0, tools, tool_choice });
    assert.equal(call.stop_reason, "tool_use");
    assert(cities.includes(call.content[0].input.to.name));
  },

  // Texts, streams, a forced call and an object, by chats and by responses.
  async ai() {
    const { generateObject, generateText, jsonSchema, streamText, tool } = await library("ai");
    const { createOpenAICompatible } = await library("@ai-sdk/openai-compatible");
    const { createOpenAI } = await library("@ai-sdk/openai");
    const options = { name: "hardpoint", baseURL: `${url}/v1`, apiKey: "none" };
    const providers = [createOpenAICompatible({ ...options, supportsStructuredOutputs: true }), createOpenAI(options)];
    for (const provider of providers) {
      const model = provider("demo");
      assert((await generateText({ model, prompt, maxOutputTokens: 16 })).text);
      assert(await joined(streamText({ model, prompt, maxOutputTokens: 16 }).textStream));
      const greedy = { model, prompt, temperature: 0, maxOutputTokens: 400 };
      const { object } = await generateObject({ ...greedy, schema: jsonSchema(trip) });
      assert(cities.includes(object.to.name));
      const tools = { travel: tool({ description: "Travel.", inputSchema: jsonSchema(trip) }) };
      const { toolCalls } = await generateText({ ...greedy, tools, toolChoice: { type: "tool", toolName: "travel" } });
      assert.equal(toolCalls.length, 1);
      assert(cities.includes(toolCalls[0].input.to.name));
    }
  },
};

await clients[name]();
